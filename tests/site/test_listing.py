"""`list` ranks by the score of any task, as `leaderboard` does."""

from pathlib import Path

import pytest
from cli_output import Cli
from hub_uses import HARD, hub_with, put_version
from measured_artifacts import figure, gpqa
from tiny_artifacts import artifact_files

import oscar_zoo
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import ScoreNotFound
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.score_file import ScoreFile
from oscar_zoo.site.status import attach_scores

BETTER = ArtifactId("tiny-qwen3-hard", "better")
BARE = ArtifactId("tiny-qwen3-hard", "unknown")


@pytest.fixture
def hub(tmp_path: Path) -> str:
    """Three versions of one model, of which two have scores in AIME and a perplexity."""
    hub = hub_with(tmp_path / "hub", artifact_files())
    for artifact in (BETTER, BARE):
        put_version(hub, artifact, artifact_files(artifact=str(artifact), seed=1))
    for artifact, aime, perplexity in ((HARD, 40.0, 3.01), (BETTER, 60.0, 3.1)):
        digest = Version.on(hub, artifact).digest
        scores: tuple[Score, ...] = (
            gpqa(digest, task="aime25", value=aime, stderr=None, reporter="third_party"),
            figure("perplexity", 3.0, perplexity, digest=digest),
        )
        attach_scores(hub, str(artifact), ScoreFile.of(artifact, digest, scores), what="f")
    return hub.name


@pytest.mark.parametrize(
    ("task", "first"), [("aime", BETTER), ("AIME25", BETTER), ("perplexity", HARD)]
)
def test_the_best_score_comes_first_as_on_the_board(
    hub: str, task: str, first: ArtifactId, capsys: pytest.CaptureFixture[str]
) -> None:
    second = HARD if first == BETTER else BETTER
    cli = Cli(capsys)
    words = ("list", "tiny", "--hub", hub, "--sort", "score", "--task", task)
    rows = cli.json(0, *words)["artifacts"]
    assert [row["id"] for row in rows] == [str(first), str(second), str(BARE)]
    board = oscar_zoo.leaderboard(task, hubs=hub)
    assert [place.id for place in board.places] == [first, second]
    assert f"{board.task} BF16 → INT2" in cli(0, *words)


def test_a_task_that_nobody_reports_is_named(hub: str) -> None:
    with pytest.raises(ScoreNotFound):
        oscar_zoo.list_artifacts(hubs=hub, sort="score", task="nonsense")
    assert len(oscar_zoo.list_artifacts(hubs=hub, sort="score").rows) == 3
