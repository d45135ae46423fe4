"""`scores`, and scores in `publish`, `list`, `info` and the card: what people and programs see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli
from hub_uses import HARD
from measured_artifacts import figure, gpqa, measured, measured_files, write_scores
from tiny_artifacts import artifact_files, write_folder

import oscar_zoo
from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry import score_file
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.score_file import ScoreFile

NAME = HARD.reference
FILES = measured_files()
DIGEST = Version.of(HARD, FILES).digest
UPSTREAM = Score(task="gpqa_diamond", value=55.56, kv_dtype="int2", reporter="upstream")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "out", FILES)


@pytest.fixture
def hub(cli: Cli, folder: Path, tmp_path: Path) -> str:
    """A hub with the artifact of `folder`."""
    name = f"file:{tmp_path}/hub"
    cli(0, "publish", folder, "--hub", name, "--create")
    return name


def record(path: Path, *scores: Score, digest: str = DIGEST) -> Path:
    return write_scores(path, *scores, digest=digest)


def listed(cli: Cli, hub: str) -> dict[str, Any]:
    (row,) = cli.json(0, "list", "--hub", hub)["artifacts"]
    assert isinstance(row, dict)
    return row


def test_add_attaches_and_scores_shows_with_history(cli: Cli, hub: str, tmp_path: Path) -> None:
    file = record(tmp_path / "gpqa.json", measured(DIGEST), UPSTREAM)
    shown = cli(0, "scores", "add", NAME, file, "--hub", hub)
    assert shown == f"Added: scores of {NAME} on {hub}, now gpqa_diamond\n"
    assert cli.err == f"Next: oscar-zoo scores {NAME}\n"
    later = record(tmp_path / "later.json", gpqa(DIGEST, value=57.0))
    cli(0, "scores", "add", NAME, later, "--hub", hub, "-q")
    assert cli(0, "scores", "add", NAME, later, "--hub", hub).startswith("Already there: ")
    lines = cli(0, "scores", NAME, "--hub", hub).splitlines()
    assert lines[0] == NAME
    assert "BF16 9.468, INT2 9.553" in lines[1] and "when it was made" in lines[1]
    assert "INT2 57.00 ± 2.50; measured, 2 runs, n 198" in lines[3]
    assert "11.0 % of the answers cut" in lines[3] and "earlier 55.00 (lm-eval" in lines[3]
    assert "INT2 55.56; reported by upstream, runs not reported" in lines[4]
    assert cli(0, "scores", "show", NAME, "--hub", hub).splitlines() == lines


def test_a_model_without_artifacts_has_a_next_step(cli: Cli, tmp_path: Path) -> None:
    """In the words and with the exit code of `list`."""
    step = "Compute one: oscar-zoo pull LFM2-1.2B --compute"
    assert cli(0, "list", "--for", "LFM2-1.2B", "--offline") == ""
    said = cli.err.strip()
    assert cli(0, "scores", "LFM2-1.2B", "--offline") == ""
    assert cli.err == f"{said} {step}\n"
    assert cli.json(0, "scores", "LFM2-1.2B", "--offline")["artifacts"] == []
    hubs = ("--hub", f"file:{tmp_path}/one", "--hub", f"file:{tmp_path}/two")
    assert cli(0, "scores", "LFM2-1.2B", *hubs) == ""
    *notes, last = cli.err.splitlines()
    assert len(notes) == 2 and all(line.startswith("note: no such folder") for line in notes)
    assert last == f"{said} {step}"


def test_a_folder_shows_the_scores_beside_its_rotation(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    record(folder / "scores.json", measured(DIGEST))
    lines = cli(0, "scores", folder).splitlines()
    assert lines[0] == NAME and "when it was made" in lines[1]
    assert "INT2 55.00 ± 2.50" in lines[3] and len(lines) == 4
    (one,) = oscar_zoo.scores(folder)
    assert one.scores == (measured(DIGEST),) and one.place == str(folder)
    bare = write_folder(tmp_path / "bare", artifact_files())
    assert "not reported" in cli(0, "scores", bare)
    assert cli.err == f"Next: oscar-zoo eval {bare}\n"
    cli(3, "scores", "./nowhere")


def test_what_does_not_fit_is_refused_with_a_next_step(cli: Cli, hub: str, tmp_path: Path) -> None:
    other = "sha256:" + "0" * 64
    cli(
        4,
        "scores",
        "add",
        NAME,
        record(tmp_path / "o.json", gpqa(other), digest=other),
        "--hub",
        hub,
    )
    assert other in cli.err and DIGEST in cli.err and "oscar-zoo eval" in cli.err
    cli(3, "scores", "add", NAME, tmp_path / "none.json", "--hub", hub)
    (tmp_path / "bad.json").write_text("{}")
    assert cli.json(4, "scores", "add", NAME, tmp_path / "bad.json", "--hub", hub)["error"]
    cli(2, "scores", "add", HARD.model, record(tmp_path / "f.json", gpqa(DIGEST)), "--hub", hub)
    cli(3, "scores", "add", "nobody:tag", tmp_path / "f.json", "--hub", hub)
    assert cli(0, "scores", NAME, "--hub", hub).count("\n") == 3, "nothing was attached"


def test_publish_takes_scores_along(cli: Cli, folder: Path, tmp_path: Path) -> None:
    hub = f"file:{tmp_path}/other"
    file = record(tmp_path / "gpqa.json", gpqa(DIGEST))
    cli(0, "publish", folder, "--hub", hub, "--create", "--scores", file)
    assert [score["value"] for score in listed(cli, hub)["scores"]] == [55.0]
    record(folder / "scores.json", gpqa(DIGEST, value=56.0))
    said = cli(0, "publish", folder, "--hub", hub)
    assert said.startswith(f"Already published, scores updated: {NAME} on {hub}")
    assert [score["value"] for score in listed(cli, hub)["scores"]] == [56.0]
    assert cli(0, "publish", folder, "--hub", hub).startswith("Already published: ")
    assert not cli.json(0, "publish", folder, "--hub", hub)["hubs"][0]["scores_updated"]
    record(folder / "scores.json", gpqa(DIGEST, value=57.0))
    assert cli.json(0, "publish", folder, "--hub", hub)["hubs"][0]["scores_updated"]
    assert not (tmp_path / "other" / str(HARD) / "scores.json").exists()
    cli(0, "verify", folder)
    record(folder / "scores.json", gpqa("sha256:" + "0" * 64), digest="sha256:" + "0" * 64)
    cli(4, "publish", folder, "--hub", hub)


def test_perplexity_of_eval_is_what_listings_show(cli: Cli, hub: str, tmp_path: Path) -> None:
    assert "+0.90 %" in cli(0, "list", "--hub", hub)
    scores = (
        figure("perplexity", 10.0, 10.2, digest=DIGEST),
        figure("recall", 99.0, 97.5, digest=DIGEST),
    )
    cli(0, "scores", "add", NAME, record(tmp_path / "f.json", *scores), "--hub", hub)
    text = cli(0, "list", "--hub", hub)
    assert "+2.00 %" in text and "99.0 → 97.5 %" in text and "+0.90 %" not in text
    assert listed(cli, hub)["measured"]["perplexity"] == 10.2
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "BF16 10, INT2 10.2 (+2.00 %)" in card and "perplexity 10.20" not in card
    assert "BF16 10, INT2 10.2 (+2.00 %)" in cli(0, "info", NAME, "--hub", hub)


def test_records_of_this_machine_are_shown_until_they_are_published(
    cli: Cli, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSCAR_ZOO_STATE", str(tmp_path / "state"))
    path = score_file.in_state(HARD)
    score_file.keep(path, ScoreFile.of(HARD, DIGEST, (gpqa(DIGEST),)))
    assert "not published gpqa_diamond: BF16 not reported" in cli(0, "scores", NAME, "--hub", hub)
    assert cli.err == f"Next: oscar-zoo scores add {NAME} {path}\n"
    cli(0, "scores", "add", NAME, path, "--hub", hub)
    assert "not published" not in cli(0, "scores", NAME, "--hub", hub)
