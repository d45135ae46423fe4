"""`compare` and `leaderboard`: what people and programs see of the quality of several artifacts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_output import Cli
from hub_uses import HARD
from measured_artifacts import SELECTION, gpqa, measured, measured_files, write_scores
from tiny_artifacts import artifact_files, write_folder

import oscar_zoo
from oscar_zoo import build_site
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import ScoreNotFound, UsageError
from oscar_zoo.registry.changes import Version

OTHER = ArtifactId.parse("tiny-qwen3-hard/seq512_prompt3_group64")
CHOSEN = SELECTION["chosen"] | {"perplexity": 9.5, "change_percent": 0.3, "recall": 0.9}
FILES = {
    HARD: measured_files(),
    OTHER: measured_files(SELECTION | {"chosen": CHOSEN}, artifact=str(OTHER), seed=1),
}
QWEN = "Qwen3-8B:seq20000_prompt83_group128"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def hub(cli: Cli, tmp_path: Path) -> str:
    """A hub of two versions for one model, with a measured and a reported score of GPQA."""
    name = f"file:{tmp_path}/hub"
    for artifact, files in FILES.items():
        folder = write_folder(tmp_path / artifact.tag, files)
        cli(0, "publish", folder, "--hub", name, "--create")
    digest = Version.of(HARD, FILES[HARD]).digest
    aime = gpqa(digest, task="aime25")
    attach(cli, name, tmp_path / "own.json", HARD, measured(digest), aime)
    told = Score(
        task="gpqa_diamond", value=58.0, kv_dtype="int2", reporter="third_party", who="Ada"
    )
    told = told.model_copy(update={"who": "Ada"})
    attach(cli, name, tmp_path / "told.json", OTHER, told)
    return name


def attach(cli: Cli, hub: str, path: Path, artifact: ArtifactId, *scores: Score) -> None:
    digest = Version.of(artifact, FILES[artifact]).digest
    file = write_scores(path, *scores, digest=digest, artifact=artifact)
    cli(0, "scores", "add", artifact.reference, file, "--hub", hub)


def test_two_artifacts_stand_side_by_side(cli: Cli, hub: str) -> None:
    head, *lines = cli(0, "compare", HARD.reference, OTHER.reference, "--hub", hub).splitlines()
    assert head.split() == [HARD.reference, OTHER.reference]
    rows = {cells[0]: cells[1:] for cells in (re.split("  +", line) for line in lines[:-1])}
    assert next(iter(rows)) == "* perplexity"
    assert rows["* perplexity"] == ["+0.90 %", "+0.30 %"]
    assert rows["* recall"] == ["99.2 → 98.4 %", "99.2 → 90.0 %"]
    measured = "56.50 → 55.00 ± 2.50 (measured)"
    assert rows["* gpqa_diamond"] == [measured, "? → 58.00 (third party)"]
    assert rows["* aime25"] == ["? → 55.00 ± 2.50 (measured)", "not reported"]
    assert [line[:7] for line in lines if "model" in line] == ["  model"]
    assert rows["* digest"][0] == Version.of(HARD, FILES[HARD]).digest[:19]
    assert lines[-1] == "Who measured what, and how: oscar-zoo scores show NAME"


def test_a_folder_is_compared_with_a_name_and_asks_no_hub_for_itself(
    cli: Cli, hub: str, tmp_path: Path
) -> None:
    mine = write_folder(tmp_path / "mine", artifact_files(seed=2))
    write_scores(
        mine / "scores.json",
        gpqa(Version.of(HARD, artifact_files(seed=2)).digest, value=40.0, stderr=3.4),
        digest=Version.of(HARD, artifact_files(seed=2)).digest,
    )
    shown = cli(0, "compare", mine, HARD.reference, "--hub", hub)
    assert shown.split("\n")[0].split() == [str(mine), HARD.reference]  # both have one name
    assert "? → 40.00 ± 3.40 (measured)" in shown
    both = ("compare", mine, tmp_path / HARD.tag)
    assert cli(0, *both, "--hub", f"file:{tmp_path}/nowhere").count(str(tmp_path)) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("Qwen3-8B", "qwen/qwen3-8b"), 2, f"are the same artifact, {QWEN}. Others for this model"),
        (("Qwen3-8B", "Qwen3-32A"), 3, "no artifact is called 'Qwen3-32A'. Did you mean Qwen3-32B"),
        (("Qwen3-8B:nope", "Qwen3-32B"), 3, f"called 'Qwen3-8B:nope'. Known: {QWEN}\n"),
        (("Qwen3-14B", "Qwen3-8B"), 3, "is known. Compute one: oscar-zoo pull Qwen3-14B --compute"),
        (("./nowhere", "Qwen3-8B"), 3, "no such folder of an artifact: ./nowhere. Check the path"),
        (("./", "Qwen3-8B"), 3, "has no oscar.json, so nothing is known of it. Name a folder"),
        (("Qwen3-8B", "?"), 2, "'?'"),
        ((HARD.model, "Qwen3-8B"), 2, f"could be any of {HARD.reference}, {OTHER.reference}"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    cli: Cli, hub: str, words: tuple[str, str], code: int, said: str
) -> None:
    assert cli(code, "compare", *words, "--hub", hub) == ""
    assert cli.err.startswith("error: ") and said in cli.err and cli.err.count("\n") == 1


def test_the_board_ranks_and_says_who_reports_and_what_was_seen(cli: Cli, hub: str) -> None:
    head, *lines = cli(0, "leaderboard", "--hub", hub).splitlines()
    assert head.split() == ["#", "ARTIFACT", "REPORTED", "BY", "BF16", "INT2", "DIFFERENCE", "N"]
    told, own, what = lines
    assert told.split() == ["1", OTHER.reference, "Ada", "-", "58.00", "-", "-"]
    assert own.startswith(f"2  {HARD.reference}  measured") and "55.00 ± 2.50" in own
    assert own.endswith("-1.50 [-4.00, +1.00]  198")
    assert what == "gpqa_diamond: accuracy in percent, the highest with INT2 first"


def test_perplexity_is_ranked_by_its_change_and_recall_by_its_value(cli: Cli, hub: str) -> None:
    places = cli.json(0, "leaderboard", "--task", "perplexity", "--hub", hub)["places"]
    assert [place["id"] for place in places] == [str(OTHER), str(HARD)]
    assert places[1]["change_percent"] == pytest.approx(100 * (9.553 / 9.468 - 1))
    text = cli(0, "leaderboard", "--task", "perplexity", "--hub", hub)
    assert "CHANGE" in text.splitlines()[0] and "smallest change over BF16 first" in text
    recall = cli.json(0, "leaderboard", "--task", "recall", "--hub", hub)
    assert [place["score"]["value"] for place in recall["places"]] == [98.4, 90.0]
    assert recall["tasks"] == ["aime25", "gpqa_diamond", "perplexity", "recall"]


def test_the_board_of_what_was_measured(cli: Cli, hub: str) -> None:
    board = cli.json(0, "leaderboard", "--measured", "--hub", hub)
    (place,) = board["places"]
    assert (board["task"], place["id"], place["rank"]) == ("gpqa_diamond", str(HARD), 1)
    assert (place["difference"], place["lower95"], place["upper95"]) == (-1.5, -4, 1)
    cli(0, "yank", HARD.reference, "--hub", hub, "--reason", "wrong data")
    cli(3, "leaderboard", "--measured", "--hub", hub)
    assert cli.err == (
        "error: no score of gpqa_diamond was measured with oscar-zoo. What others report: oscar-zoo"
        " leaderboard --task gpqa_diamond\n"
    )


def test_a_score_under_other_settings_has_no_place(cli: Cli, hub: str, tmp_path: Path) -> None:
    digest = Version.of(OTHER, FILES[OTHER]).digest
    changed = gpqa(digest, value=60.0, stderr=2.46, recipe_changes={"clip": "1,1"})
    attach(cli, hub, tmp_path / "changed.json", OTHER, changed)
    board = cli.json(0, "leaderboard", "--hub", hub)["places"]
    assert [place["score"]["value"] for place in board] == [58.0, 55.0]
    for words in (("list",), ("compare", OTHER.reference, HARD.reference)):
        shown = cli(0, *words, "--hub", hub)
        assert "60.00" not in shown and "58.00" in shown
    build_site(tmp_path / "site", hubs=hub)
    assert "60.00" not in (tmp_path / "site/index.html").read_text("utf-8")
    rows = cli.json(0, "list", "--hub", hub)["artifacts"]
    scores = next(row for row in rows if row["id"] == str(OTHER))["scores"]
    assert [score["recipe_changes"] for score in scores] == [{"clip": "1,1"}, {}]


def test_a_hub_that_does_not_answer_is_noted(cli: Cli, hub: str, tmp_path: Path) -> None:
    hubs = ("--hub", hub, "--hub", f"file:{tmp_path}/nowhere")
    for command in (("compare", HARD.reference, OTHER.reference), ("leaderboard",)):
        cli(0, *command, *hubs)
        assert cli.err.startswith("note: ") and "nowhere" in cli.err
        assert "nowhere" in cli.json(0, *command, *hubs)["notes"][0]


def test_the_calls_of_the_library(hub: str, tmp_path: Path) -> None:
    found = oscar_zoo.compare(tmp_path / HARD.tag, OTHER.reference, hubs=hub)
    assert found.names == (HARD.reference, OTHER.reference) and "measured" in found.differences
    with pytest.raises(UsageError, match="the same artifact"):
        oscar_zoo.compare(HARD.reference, HARD.reference, hubs=hub)
    board = oscar_zoo.leaderboard("aime", hubs=hub)
    assert board.task == "aime25" and [one.score.value for one in board.places] == [55.0]
    with pytest.raises(ScoreNotFound):
        oscar_zoo.leaderboard("mmlu", hubs=hub)
