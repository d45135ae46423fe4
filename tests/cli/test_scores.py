"""`scores`, `compare` and `leaderboard`, and scores in `publish`, `list`, `info` and the card: what
people and programs see of the quality of artifacts."""

import re
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli
from hub_uses import HARD
from measured_artifacts import SELECTION, figure, gpqa, measured, measured_files, write_scores
from tiny_artifacts import artifact_files, write_folder

import oscar_zoo
from oscar_zoo import build_site
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score, TokenCounts
from oscar_zoo.errors import ScoreNotFound, UsageError
from oscar_zoo.registry import score_file
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.score_file import ScoreFile

NAME = HARD.reference
FILES = measured_files()
DIGEST = Version.of(HARD, FILES).digest
UPSTREAM = Score(task="gpqa_diamond", value=55.56, kv_dtype="int2", reporter="upstream")
OTHER = ArtifactId.parse("tiny-qwen3-hard/seq512_prompt3_group64")
CHOSEN = SELECTION["chosen"] | {"perplexity": 9.5, "change_percent": 0.3, "recall": 0.9}
BOTH = {
    HARD: measured_files(),
    OTHER: measured_files(SELECTION | {"chosen": CHOSEN}, artifact=str(OTHER), seed=1),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "out", FILES)


@pytest.fixture
def hub(cli: Cli, folder: Path, tmp_path: Path) -> str:
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
    assert "11.0 % of the answers cut" in lines[3] and "also 55.00 (lm-eval" in lines[3]
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


def test_a_folder_shows_scores_beside_its_rotation(cli: Cli, folder: Path, tmp_path: Path) -> None:
    record(folder / "scores.json", measured(DIGEST))
    lines = cli(0, "scores", folder).splitlines()
    assert lines[0] == NAME and "when it was made" in lines[1]
    assert "INT2 55.00 ± 2.50" in lines[3] and len(lines) == 4
    (one,) = oscar_zoo.scores(folder)
    assert one.scores == (measured(DIGEST),) and one.place == str(folder)
    bare = write_folder(tmp_path / "bare", artifact_files())
    assert "not reported" in cli(0, "scores", bare)
    assert cli.err == f"Next: oscar-zoo eval {bare} --model FOLDER\n"  # of a model on no hub
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
    short = {"digest": DIGEST, "tokens": TokenCounts(prompt=2048, completion=0)}
    small = [figure("perplexity", 10.0, 20.0, **short), figure("recall", 99.0, 9.0, **short)]
    cli(0, "scores", "add", NAME, record(tmp_path / "f.json", *small), "--hub", hub)
    assert listed(cli, hub)["measured"]["perplexity"] == 9.553, "of 4,096 tokens, when it was made"
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
    score_file.keep(path, ScoreFile.of(HARD, DIGEST, (gpqa(DIGEST, n=9, value=40.0, stderr=16.0),)))
    for own in (1, 0):
        (known,) = cli.json(0, "scores", NAME, "--hub", hub)["artifacts"]
        assert len(known["not_published"]) == own
        cli(0, "scores", "add", NAME, path, "--hub", hub)
    assert [one["value"] for one in known["scores"]] == [55.0]
    assert [one["value"] for one in known["scores"][0]["history"]] == [40.0]


@pytest.fixture
def two(cli: Cli, tmp_path: Path) -> str:
    """A hub of two versions for one model, with a measured and a reported score of GPQA."""
    name = f"file:{tmp_path}/hub"
    for artifact, files in BOTH.items():
        folder = write_folder(tmp_path / artifact.tag, files)
        cli(0, "publish", folder, "--hub", name, "--create")
    digest = Version.of(HARD, BOTH[HARD]).digest
    aime = gpqa(digest, task="aime25")
    attach(cli, name, tmp_path / "own.json", HARD, measured(digest), aime)
    told = Score(
        task="gpqa_diamond", value=58.0, kv_dtype="int2", reporter="third_party", who="Ada"
    )
    told = told.model_copy(update={"who": "Ada"})
    attach(cli, name, tmp_path / "told.json", OTHER, told)
    return name


def attach(cli: Cli, hub: str, path: Path, artifact: ArtifactId, *scores: Score) -> None:
    digest = Version.of(artifact, BOTH[artifact]).digest
    file = write_scores(path, *scores, digest=digest, artifact=artifact)
    cli(0, "scores", "add", artifact.reference, file, "--hub", hub)


def test_two_artifacts_stand_side_by_side(cli: Cli, two: str) -> None:
    head, *lines = cli(0, "compare", HARD.reference, OTHER.reference, "--hub", two).splitlines()
    assert head.split() == [HARD.reference, OTHER.reference]
    rows = {cells[0]: cells[1:] for cells in (re.split("  +", line) for line in lines[:-1])}
    assert next(iter(rows)) == "* perplexity"
    assert rows["* perplexity"] == ["+0.90 %", "+0.30 %"]
    assert rows["* recall"] == ["99.2 → 98.4 %", "99.2 → 90.0 %"]
    measured = "56.50 → 55.00 ± 2.50 (measured)"
    assert rows["* gpqa_diamond"] == [measured, "? → 58.00 (third party)"]
    assert rows["* aime25"] == ["? → 55.00 ± 2.50 (measured)", "not reported"]
    assert [line[:7] for line in lines if "model" in line] == ["  model"]
    assert rows["* digest"][0] == Version.of(HARD, BOTH[HARD]).digest[:19]
    assert lines[-1] == "Who measured what, and how: oscar-zoo scores show NAME"


def test_a_folder_beside_a_name_asks_no_hub_for_itself(cli: Cli, two: str, tmp_path: Path) -> None:
    mine = write_folder(tmp_path / "mine", artifact_files(seed=2))
    write_scores(
        mine / "scores.json",
        gpqa(Version.of(HARD, artifact_files(seed=2)).digest, value=40.0, stderr=3.4),
        digest=Version.of(HARD, artifact_files(seed=2)).digest,
    )
    shown = cli(0, "compare", mine, HARD.reference, "--hub", two)
    assert shown.split("\n")[0].split() == [str(mine), HARD.reference]  # both have one name
    assert "? → 40.00 ± 3.40 (measured)" in shown
    both = ("compare", mine, tmp_path / HARD.tag)
    assert cli(0, *both, "--hub", f"file:{tmp_path}/nowhere").count(str(tmp_path)) == 2


def test_the_board_ranks_and_says_who_reports_and_what_was_seen(cli: Cli, two: str) -> None:
    head, *lines = cli(0, "leaderboard", "--hub", two).splitlines()
    assert head.split() == ["#", "ARTIFACT", "REPORTED", "BY", "BF16", "INT2", "DIFFERENCE", "N"]
    told, own, what, why = lines
    assert why[:2] == "- " and told.split() == ["1", OTHER.reference, "Ada", "-", "58.00", "-", "-"]
    assert own.startswith(f"2  {HARD.reference}  measured") and "55.00 ± 2.50" in own
    assert own.endswith("-1.50 [-4.00, +1.00]  198")
    assert what == "gpqa_diamond: accuracy in percent, the highest with INT2 first"


def test_perplexity_is_ranked_by_its_change_and_recall_by_its_value(cli: Cli, two: str) -> None:
    places = cli.json(0, "leaderboard", "--task", "perplexity", "--hub", two)["places"]
    assert [place["id"] for place in places] == [str(OTHER), str(HARD)]
    assert places[1]["change_percent"] == pytest.approx(100 * (9.553 / 9.468 - 1))
    text = cli(0, "leaderboard", "--task", "perplexity", "--hub", two)
    assert "CHANGE" in text.splitlines()[0] and "smallest change over BF16 first" in text
    recall = cli.json(0, "leaderboard", "--task", "recall", "--hub", two)
    assert [place["score"]["value"] for place in recall["places"]] == [98.4, 90.0]
    assert recall["tasks"] == ["aime25", "gpqa_diamond", "perplexity", "recall"]


def test_the_board_of_what_was_measured(cli: Cli, two: str) -> None:
    board = cli.json(0, "leaderboard", "--measured", "--hub", two)
    (place,) = board["places"]
    assert (board["task"], place["id"], place["rank"]) == ("gpqa_diamond", str(HARD), 1)
    assert (place["difference"], place["lower95"], place["upper95"]) == (-1.5, -4, 1)
    cli(0, "yank", HARD.reference, "--hub", two, "--reason", "wrong data")
    cli(3, "leaderboard", "--measured", "--hub", two)
    assert cli.err == (
        "error: no score of gpqa_diamond was measured with oscar-zoo. What others report: oscar-zoo"
        " leaderboard --task gpqa_diamond\n"
    )


def test_a_score_under_other_settings_has_no_place(cli: Cli, two: str, tmp_path: Path) -> None:
    digest = Version.of(OTHER, BOTH[OTHER]).digest
    changed = gpqa(digest, value=60.0, stderr=2.46, recipe_changes={"clip": "1,1"})
    attach(cli, two, tmp_path / "changed.json", OTHER, changed)
    board = cli.json(0, "leaderboard", "--hub", two)["places"]
    assert [place["score"]["value"] for place in board] == [58.0, 55.0]
    for words in (("list",), ("compare", OTHER.reference, HARD.reference)):
        shown = cli(0, *words, "--hub", two)
        assert "60.00" not in shown and "58.00" in shown
    build_site(tmp_path / "site", hubs=two)
    assert "60.00" not in (tmp_path / "site/index.html").read_text("utf-8")
    rows = cli.json(0, "list", "--hub", two)["artifacts"]
    scores = next(row for row in rows if row["id"] == str(OTHER))["scores"]
    assert [score["recipe_changes"] for score in scores] == [{"clip": "1,1"}, {}]


def test_a_hub_that_does_not_answer_is_noted(cli: Cli, two: str, tmp_path: Path) -> None:
    hubs = ("--hub", two, "--hub", f"file:{tmp_path}/nowhere")
    for command in (("compare", HARD.reference, OTHER.reference), ("leaderboard",)):
        cli(0, *command, *hubs)
        assert cli.err.startswith("note: ") and "nowhere" in cli.err
        assert "nowhere" in cli.json(0, *command, *hubs)["notes"][0]


def test_the_calls_of_the_library(two: str, tmp_path: Path) -> None:
    found = oscar_zoo.compare(tmp_path / HARD.tag, OTHER.reference, hubs=two)
    assert found.names == (HARD.reference, OTHER.reference) and "measured" in found.differences
    with pytest.raises(UsageError, match="the same artifact"):
        oscar_zoo.compare(HARD.reference, HARD.reference, hubs=two)
    board = oscar_zoo.leaderboard("aime", hubs=two)
    assert board.task == "aime25" and [one.score.value for one in board.places] == [55.0]
    with pytest.raises(ScoreNotFound):
        oscar_zoo.leaderboard("mmlu", hubs=two)
