"""What `publish` asks for: perplexity and recall under the recipe, near those of BF16."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli
from hub_uses import HARD, put_version
from measured_artifacts import (
    SELECTION,
    figure,
    gpqa,
    measured_files,
    measured_manifest,
    write_scores,
)
from tiny_artifacts import FILE_NAME, artifact_files, manifest, payload, write_folder

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index, IndexEntry

NAME = HARD.reference
DIGEST = Version.of(HARD, payload()).digest


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def hub(tmp_path: Path) -> str:
    (tmp_path / "hub").mkdir()
    return f"file:{tmp_path}/hub"


def made(tmp_path: Path, files: dict[str, bytes], *scores: Score) -> Path:
    """A folder with `files` and a score file."""
    folder = write_folder(tmp_path / "made", files)
    if scores:
        write_scores(folder / "scores.json", *scores, digest=DIGEST)
    return folder


def chosen(**change: Any) -> dict[str, Any]:
    """A selection of `compute` whose chosen fit was measured otherwise."""
    return SELECTION | {"chosen": SELECTION["chosen"] | change}


def perplexity(after: float, **more: Any) -> Score:
    return figure("perplexity", 10.0, after, digest=DIGEST, **more)


RECALL = figure("recall", 99.0, 98.0, digest=DIGEST)


def entry(hub: str) -> IndexEntry:
    found = Index.from_bytes(Path(hub[5:], "index.json").read_bytes()).entry(HARD)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("files", "scores", "missing", "command"),
    [
        (artifact_files(), (), "perplexity and recall", "eval ./made --model FOLDER measures"),
        (artifact_files(), (perplexity(10.1),), "recall", "--model FOLDER --task recall measures"),
        (artifact_files(), (RECALL,), "perplexity", "--task perplexity measures"),
        (measured_files(chosen(recall=None)), (), "recall", "--task recall measures"),
        (
            artifact_files(),
            (perplexity(10.1, recipe_changes={"clip": "0.9,0.9"}), RECALL),
            "perplexity",
            "--task perplexity",
        ),
        (artifact_files(), (gpqa(DIGEST),), "perplexity and recall", "--unmeasured"),
    ],
)
def test_what_was_not_measured_is_refused_with_the_command_that_measures_it(
    cli: Cli,
    hub: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, bytes],
    scores: tuple[Score, ...],
    missing: str,
    command: str,
) -> None:
    made(tmp_path, files, *scores)
    monkeypatch.chdir(tmp_path)
    cli(2, "publish", "./made", "--hub", hub)
    assert cli.err.startswith(f"error: nobody measured the {missing} of {NAME} under its recipe")
    assert command in cli.err and cli.err.count("\n") == 1
    cli(2, "publish", "./made", "--hub", hub, "--dry-run")
    assert not list(Path(hub[5:]).iterdir())
    cli(0, "publish", "./made", "--hub", hub, "--unmeasured")
    assert entry(hub).accepted == ("unmeasured",)
    assert "published without measurements" in Path(hub[5:], "README.md").read_text()


@pytest.mark.parametrize(
    ("files", "scores"),
    [
        (measured_files(), ()),
        (artifact_files(), (perplexity(10.5), RECALL)),
        (measured_files(chosen(recall=None)), (RECALL,)),
    ],
)
def test_what_was_measured_is_published(
    cli: Cli, hub: str, tmp_path: Path, files: dict[str, bytes], scores: tuple[Score, ...]
) -> None:
    cli(0, "publish", made(tmp_path, files, *scores), "--hub", hub)
    assert entry(hub).accepted == () and b"accepted" not in Path(hub[5:], "index.json").read_bytes()


@pytest.mark.parametrize(
    ("files", "scores", "percent"),
    [
        (measured_files(chosen(change_percent=5.2)), (), "5.2"),
        (artifact_files(), (perplexity(10.6), RECALL), "6.0"),
        (measured_files(), (perplexity(10.6), RECALL), "6.0"),
        (measured_files(chosen(change_percent=9.0)), (perplexity(10.1), RECALL), "9.0"),
    ],
)
def test_poor_quality_is_refused_unless_it_is_accepted_and_that_is_recorded(
    cli: Cli,
    hub: str,
    tmp_path: Path,
    files: dict[str, bytes],
    scores: tuple[Score, ...],
    percent: str,
) -> None:
    folder = made(tmp_path, files, *scores)
    cli(2, "publish", folder, "--hub", hub, "--unmeasured")
    assert f"is {percent} % above BF16, more than 5 %" in cli.err and "--allow-poor" in cli.err
    cli(0, "publish", folder, "--hub", hub, "--allow-poor")
    assert entry(hub).accepted == ("poor",)
    assert "poor quality accepted" in Path(hub[5:], "README.md").read_text()
    cli(0, "pull", NAME, "--hub", hub)
    assert "although its perplexity is more than 5 % above BF16" in cli.err
    cli(0, "mirror", hub, f"file:{tmp_path}/copy", "--all", "--create")
    assert entry(f"file:{tmp_path}/copy").accepted == ("poor",)
    cli(0, "yank", NAME, "--hub", hub, "--reason", "poor")
    assert entry(hub).accepted == ("poor",)


@pytest.mark.parametrize(
    ("files", "scores"),
    [
        (measured_files(chosen(change_percent=5.2)), ()),
        (artifact_files(), (perplexity(10.6), RECALL)),
    ],
)
def test_poor_quality_is_told_without_the_hub(
    cli: Cli, hub: str, tmp_path: Path, files: dict[str, bytes], scores: tuple[Score, ...]
) -> None:
    cli(0, "publish", made(tmp_path, files, *scores), "--hub", hub, "--allow-poor")
    cli(0, "pull", NAME, "--hub", hub)
    shutil.rmtree(hub[5:])
    sentence = f"{NAME} was published although its perplexity is more than 5 % above BF16"
    for command in (
        ("pull", NAME, "--offline"),
        ("info", NAME, "--offline"),
        ("list", "--installed"),
        ("verify", NAME),
        ("scores", NAME, "--offline"),
    ):
        cli(0, *command)
        assert sentence in " ".join(cli.err.split()), command
    (row,) = cli.json(0, "list", "--installed")["artifacts"]
    measured = cli.json(0, "info", NAME, "--offline")["measured"][str(HARD)]
    percent = 5.2 if not scores else 6.0
    assert round(measured["change_percent"], 6) == percent
    assert round(row["measured"]["change_percent"], 6) == percent
    (shown,) = cli.json(0, "scores", NAME, "--offline")["artifacts"]
    assert round((shown["made"] or shown["at_pull"])["change_percent"], 6) == percent
    assert sentence in shown["warnings"][0]
    other = write_folder(tmp_path / "other", artifact_files(seed=1))
    compared, _ = cli.json(0, "compare", NAME, other, "--offline")["artifacts"]
    assert round(compared["measured"]["change_percent"], 6) == percent
    assert compared["accepted"] == ["poor"]


def test_poor_quality_in_a_manifest_is_told_where_no_index_says_it(
    cli: Cli, hub: str, tmp_path: Path
) -> None:
    put_version(LocalHub(Path(hub[5:])), HARD, measured_files(chosen(change_percent=5.2)))
    cli(0, "pull", NAME, "--hub", hub)
    cli(0, "list", "--installed")
    sentence = f"the perplexity of {NAME} is 5.2 % above BF16"
    assert sentence in " ".join(cli.err.split())
    cli(0, "pull", NAME, "--offline")
    assert sentence in " ".join(cli.err.split())


def test_what_others_made_cannot_be_asked_for_measurements(
    cli: Cli, hub: str, tmp_path: Path
) -> None:
    mine = manifest(payload())
    theirs = mine.model_copy(
        update={"provenance": mine.provenance.model_copy(update={"kind": "imported"})}
    )
    folder = made(tmp_path, {**payload(), FILE_NAME: theirs.to_bytes()})
    cli(0, "publish", folder, "--hub", hub)
    assert entry(hub).accepted == () and "GPQA" not in cli.err


def test_gpqa_is_recommended_until_it_is_there(cli: Cli, hub: str, tmp_path: Path) -> None:
    small = measured_manifest(artifact="mine/tag")
    model = small.model.model_copy(update={"num_q_heads": 64})  # a thousand million parameters
    large = small.model_copy(update={"model": model})
    folder = made(tmp_path, {**payload(), FILE_NAME: large.to_bytes()})
    cli(0, "publish", folder, "--hub", hub)
    assert "no GPQA was measured" in cli.err and "--task gpqa_diamond" in cli.err
    scores = {"digest": large.digest, "artifact": large.artifact_id}
    file = write_scores(tmp_path / "gpqa.json", gpqa(large.digest), **scores)
    cli(0, "publish", folder, "--hub", hub, "--scores", file)
    assert "GPQA" not in cli.err
