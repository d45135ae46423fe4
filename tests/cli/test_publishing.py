"""The commands that write to hubs, in process, and what `publish` asks for: perplexity and recall
under the recipe, near those of BF16."""

import shutil
import subprocess
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
from raw_server import closed_port
from tiny_artifacts import FILE_NAME, artifact_files, manifest, payload, write_folder

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index, IndexEntry

NAME = HARD.reference
DIGEST = Version.of(HARD, payload()).digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "out", measured_files())


@pytest.fixture
def hub(tmp_path: Path) -> str:
    (tmp_path / "hub").mkdir()
    return f"file:{tmp_path}/hub"


def index_in(folder: Path) -> Index:
    return Index.from_bytes((folder / "index.json").read_bytes())


def test_publish_tells_what_it_did_and_the_next_step(cli: Cli, folder: Path, hub: str) -> None:
    out = cli(0, "publish", folder, "--hub", hub)
    assert out.startswith(f"Published: {NAME} on {hub}  sha256:")
    assert cli.err == f"Next: oscar-zoo pull {NAME} --hub {hub}\n"
    assert cli(0, "publish", folder, "--hub", hub, "-q").startswith("Already published: ")
    assert cli.err == ""


def test_publishing_has_one_row_per_hub(cli: Cli, folder: Path, hub: str, tmp_path: Path) -> None:
    second = f"file:{tmp_path}/second"
    (tmp_path / "second").mkdir()
    value = cli.json(0, "publish", folder, "--hub", hub, "--hub", second, "--alias", "hard")
    assert (value["schema"], value["errors"]) == ("oscar-zoo.publish/1", [])
    assert [row["hub"] for row in value["hubs"]] == [hub, second]
    assert {row["id"] for row in value["hubs"]} == {str(HARD)}
    assert [e.aliases for e in index_in(tmp_path / "second").artifacts] == [("hard",)]


def test_a_missing_hub_is_made_only_when_asked_for(cli: Cli, folder: Path, tmp_path: Path) -> None:
    typo = f"file:{tmp_path}/tpyo/zoo"
    cli(0, "publish", folder, "--hub", typo, "--create", "--dry-run")
    assert not (tmp_path / "tpyo").exists()
    cli(0, "publish", folder, "--hub", typo, "--create")
    copy = f"file:{tmp_path}/copy"
    cli(3, "mirror", typo, copy, "--all")
    assert "--create" in cli.err and not (tmp_path / "copy").exists()
    cli(0, "mirror", typo, copy, "--all", "--create")
    cli(3, "yank", NAME, "--hub", f"file:{tmp_path}/nowhere", "--reason", "x")
    assert not (tmp_path / "nowhere").exists()


def test_the_first_hub_decides_and_a_later_one_is_reported(
    cli: Cli, folder: Path, hub: str, tmp_path: Path
) -> None:
    taken = f"file:{tmp_path}/taken"
    put_version(LocalHub(tmp_path / "taken", must_exist=False), HARD, measured_files(seed=1))
    error = cli.json(7, "publish", folder, "--hub", taken, "--hub", hub)["error"]
    assert error["code"] == "conflict.version"
    assert not list((tmp_path / "hub").iterdir())
    value = cli.json(7, "publish", folder, "--hub", hub, "--hub", taken)
    assert [row["hub"] for row in value["hubs"]] == [hub]
    assert [error["code"] for error in value["errors"]] == ["conflict.version"]
    cli(7, "publish", folder, "--hub", hub, "--hub", taken)
    assert "Already published" in cli.out and "error: " in cli.err


def test_without_a_network_the_next_step_is_to_publish_again(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_port() as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # of its import
        error = cli.json(5, "publish", folder, "--hub", "hf:org/zoo")["error"]
    assert "cannot be reached" in error["message"]
    assert error["hint"] == "check the connection, then run the same command again, which is safe"


def test_a_dry_run_lists_what_would_go(cli: Cli, folder: Path, hub: str, tmp_path: Path) -> None:
    (row,) = cli.json(0, "publish", folder, "--hub", hub, "--dry-run")["hubs"]
    text = cli(0, "publish", folder, "--hub", hub, "--dry-run")
    assert "commit" not in text  # a folder has none
    assert not list((tmp_path / "hub").iterdir())
    cli(0, "publish", folder, "--hub", hub)
    root = tmp_path / "hub"
    sent = {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and not p.name.startswith((".lock", ".after."))
    }
    plan = row["plan"]
    assert {f["path"]: (f["size"], f["sha256"]) for f in plan["files"]} == {
        name: (len(data), sha256_hex(data)) for name, data in sent.items()
    }
    message = f"Publish {HARD} ({row['digest'][:19]})"
    assert (plan["serial"], plan["tag"], plan["message"]) == (1, None, message)
    assert all(file["path"] in text and file["sha256"] in text for file in plan["files"])
    assert cli(0, "publish", folder, "--hub", hub, "--dry-run").startswith("Already published: ")


def test_warnings_stop_a_publish_until_they_are_allowed(cli: Cli, hub: str, tmp_path: Path) -> None:
    files = payload(proven=False)
    folder = write_folder(tmp_path / "out", files | {FILE_NAME: manifest(files).to_bytes()})
    cli(2, "publish", folder, "--hub", hub)
    assert "pair.unproven" in cli.err and "--allow-warnings" in cli.err
    assert not list((tmp_path / "hub").iterdir())
    cli(0, "publish", folder, "--hub", hub, "--allow-warnings", "--unmeasured")
    assert "nothing in the files says" in cli.err


@pytest.mark.parametrize("hub", ["hf:org/zoo", "ms:org/zoo"])
def test_offline_mode_publishes_to_folders_only(
    cli: Cli, folder: Path, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSCAR_ZOO_OFFLINE", "1")
    for words in (
        ["publish", folder, "--hub", hub],
        ["yank", NAME, "--reason", "x", "--hub", hub],
        ["mirror", hub, f"file:{tmp_path}/hub", "--all"],
    ):
        assert cli.json(5, *words)["error"]["code"] == "network.offline"
    assert not (tmp_path / "hub").exists()


def test_yank_unyank_and_deprecate(cli: Cli, folder: Path, hub: str, tmp_path: Path) -> None:
    files = measured_files(artifact="tiny-qwen3-hard/other", seed=1)
    other = write_folder(tmp_path / "other", files)
    cli(0, "publish", folder, "--hub", hub)
    cli(0, "publish", other, "--hub", hub)
    yank = ("yank", NAME, "--reason", "wrong data", "--hub", hub)
    assert cli(0, *yank).startswith(f"Now yanked: wrong data  {NAME}")
    assert cli(0, *yank).startswith("Already yanked")
    cli(3, "pull", NAME, "--hub", hub)
    assert "wrong data" in cli.err
    assert cli(0, "unyank", NAME, "--hub", hub).startswith(f"Now active  {NAME}")
    cli(0, "pull", NAME, "--hub", hub)
    other_name = "tiny-qwen3-hard:other"
    words = ["deprecate", NAME, "--reason", "old", "--replaced-by", other_name, "--hub", hub]
    (row,) = cli.json(0, *words)["hubs"]
    status = row["status"]
    assert (status["state"], status["replaced_by"]) == ("deprecated", other_name)
    assert (row["changed"], row["serial"]) == (True, index_in(tmp_path / "hub").serial)


def test_mirror_copies_and_says_so(cli: Cli, folder: Path, hub: str, tmp_path: Path) -> None:
    target = f"file:{tmp_path}/target"
    cli(0, "publish", folder, "--hub", hub)
    planned = cli(0, "mirror", hub, target, "--all", "--dry-run", "--create")
    assert planned.startswith(f"Would copy: {NAME}") and not (tmp_path / "target").exists()
    copied = cli(0, "mirror", hub, target, "tiny-qwen3-hard", "--create")
    assert copied.startswith(f"Copied: {NAME}")
    assert "the same digests" in cli.err
    (row,) = cli.json(0, "mirror", hub, target, "--all")["artifacts"]
    assert (row["id"], row["outcome"]) == (str(HARD), "already_there")


def test_no_space_is_one_line_and_leaves_nothing(tmp_path: Path, folder: Path, cli: Cli) -> None:
    """A real full disk: a tmpfs too small for the artifact, where the machine allows mounting."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        cli.refused(8, "publish", folder, "--hub", f"file:{small}/zoo", "--create")
        assert [path.name for path in small.rglob("*")] == ["zoo", ".lock"]
    finally:
        subprocess.run(["umount", small], check=True)


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
FORGETS = figure("recall", 99.0, 88.5, digest=DIGEST)
OTHERWISE = perplexity(10.1, recipe_changes={"clip": "0.9,0.9"})


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
        (artifact_files(), (OTHERWISE, RECALL), "perplexity", "--task perplexity"),
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
    ("files", "scores", "why"),
    [
        (measured_files(chosen(change_percent=5.2)), (), "5.2 % above"),
        (artifact_files(), (perplexity(10.6), RECALL), "6.0 % above"),
        (measured_files(), (perplexity(10.6), RECALL), "6.0 % above"),
        (measured_files(chosen(change_percent=9.0)), (perplexity(10.1), RECALL), "9.0 % above"),
        (artifact_files(), (perplexity(10.1), FORGETS), "10.5 points less"),
    ],
)
def test_poor_quality_is_refused_unless_it_is_accepted_and_that_is_recorded(
    cli: Cli, hub: str, tmp_path: Path, files: dict[str, bytes], scores: tuple[Score, ...], why: str
) -> None:
    folder = made(tmp_path, files, *scores)
    cli(2, "publish", folder, "--hub", hub, "--unmeasured")
    assert why in cli.err and "--allow-poor" in cli.err
    cli(0, "publish", folder, "--hub", hub, "--allow-poor")
    assert entry(hub).accepted == ("poor",)
    assert "poor quality accepted" in Path(hub[5:], "README.md").read_text()
    cli(0, "pull", NAME, "--hub", hub)
    assert "although its perplexity or recall is poor beside BF16" in cli.err
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
    sentence = f"{NAME} was published although its perplexity or recall is poor beside BF16"
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


def test_poor_quality_is_told_where_no_index_says_it(cli: Cli, hub: str, tmp_path: Path) -> None:
    put_version(LocalHub(Path(hub[5:])), HARD, measured_files(chosen(change_percent=5.2)))
    cli(0, "pull", NAME, "--hub", hub)
    cli(0, "list", "--installed")
    sentence = f"{NAME} has a perplexity 5.2 % above BF16"
    assert sentence in " ".join(cli.err.split())
    cli(0, "pull", NAME, "--offline")
    assert sentence in " ".join(cli.err.split())


def test_work_of_others_is_not_asked_for_measurements(cli: Cli, hub: str, tmp_path: Path) -> None:
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
