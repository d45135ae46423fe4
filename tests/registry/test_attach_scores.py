"""Attaching scores to what is published: only index and card change, also under other writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hub_uses import HARD, publish, put_version
from measured_artifacts import gpqa, measured
from tiny_artifacts import artifact_files, payload, write_folder

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import AmbiguousName, ArtifactNotFound, DigestMismatchError, UsageError
from oscar_zoo.registry import changes
from oscar_zoo.registry import publish as registry
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index, IndexEntry
from oscar_zoo.registry.mirror import copy_all
from oscar_zoo.registry.publish import Publishable
from oscar_zoo.registry.score_file import ScoreFile
from oscar_zoo.site.status import ScoredVersion, attach_scores


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    """A hub with a published version, and one that is in no index."""
    monkeypatch.setattr(changes, "_JITTER_SECONDS", 0)
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    publish(write_folder(tmp_path / "one", artifact_files()), hub)
    put_version(hub, "Bare/tag", payload(seed=2))
    return hub


def entry_of(hub: LocalHub, artifact: ArtifactId = HARD) -> IndexEntry:
    hub.refresh()
    entry = Index.from_bytes(hub.root_file("index.json") or b"").entry(artifact)
    assert entry is not None
    return entry


def attach(hub: Hub, digest: str, *scores: Score, name: str = HARD.reference) -> ScoredVersion:
    file = ScoreFile.of(HARD, digest, scores)
    return attach_scores(hub, name, file, what="scores.json")


def contents(hub: LocalHub) -> dict[str, bytes]:
    """Everything below the root."""
    files = [path for path in hub.root.rglob("*.*") if path.is_file() and path.parent != hub.root]
    return {str(path): path.read_bytes() for path in files}


def test_scores_get_to_the_index_and_the_card_and_nowhere_else(hub: LocalHub) -> None:
    before, bytes_before = entry_of(hub), contents(hub)
    result = attach(hub, before.digest, measured(before.digest))
    now = entry_of(hub)
    assert now == before.model_copy(update={"scores": (measured(before.digest),)})
    assert contents(hub) == bytes_before
    assert (result.id, result.changed, result.scores) == (HARD, True, now.scores)
    card = (hub.root / "README.md").read_text()
    assert "gpqa\\_diamond 55.00 ± 2.50 (BF16 56.50 ± 2.50), n 198, 2 runs, measured" in card


def test_the_same_scores_again_write_nothing(hub: LocalHub) -> None:
    digest = entry_of(hub).digest
    first = attach(hub, digest, measured(digest))
    again = attach(hub, digest, measured(digest).model_copy(update={"date": "2027-01-01"}))
    assert (first.changed, again.changed, again.serial) == (True, False, first.serial)


def test_another_value_leaves_the_earlier_one_in_the_history(hub: LocalHub) -> None:
    digest = entry_of(hub).digest
    attach(hub, digest, measured(digest))
    result = attach(hub, digest, gpqa(digest, value=58.0))
    assert [entry.value for entry in result.scores[0].history] == [55.0]
    assert entry_of(hub).scores == result.scores


def test_a_version_without_an_entry_gets_one(hub: LocalHub) -> None:
    bare = ArtifactId("Bare", "tag")
    digest = Version.of(bare, payload(seed=2)).digest
    file = ScoreFile.of(bare, digest, (gpqa(digest),))
    attach_scores(hub, "Bare:tag", file, what="f")
    assert entry_of(hub, bare).scores == (gpqa(digest),)


def test_scores_of_other_bytes_are_refused(hub: LocalHub) -> None:
    before, digest = entry_of(hub), "sha256:" + "0" * 64
    with pytest.raises(DigestMismatchError, match=r"by scores\.json") as caught:
        attach(hub, digest, gpqa(digest))
    assert "oscar-zoo eval" in (caught.value.hint or "")
    assert entry_of(hub) == before


def test_scores_of_another_artifact_are_refused(hub: LocalHub) -> None:
    digest = entry_of(hub).digest
    file = ScoreFile.of(ArtifactId("Bare", "tag"), digest, (gpqa(digest),))
    with pytest.raises(UsageError, match="scores of Bare:tag, not of"):
        attach_scores(hub, HARD.reference, file, what="f")
    with pytest.raises(ArtifactNotFound):
        attach(hub, digest, gpqa(digest), name="nobody:tag")
    with pytest.raises((UsageError, AmbiguousName)):
        attach(hub, digest, gpqa(digest), name=HARD.model)


def test_publishing_attaches_and_mirroring_takes_them_along(hub: LocalHub, tmp_path: Path) -> None:
    files: dict[str, Any] = artifact_files(artifact="tiny-qwen3-hard/two", seed=1)
    made = Publishable.read(write_folder(tmp_path / "two", files))
    digest = made.verified.digest
    file = ScoreFile.of(made.id, digest, (measured(digest),))
    registry.publish_on(hub, made.with_scores(file, what="f"))
    assert entry_of(hub, made.id).scores == (measured(digest),)
    again = file.scores[0].model_copy(update={"value": 56.0})
    more = ScoreFile.of(made.id, digest, (again,))
    assert registry.publish_on(hub, made.with_scores(more, what="f")).already_published
    assert [e.value for e in entry_of(hub, made.id).scores[0].history] == [55.0]
    target = LocalHub(tmp_path / "copy", must_exist=False)
    copy_all(hub, target, ["tiny-qwen3-hard:two"], create=True)
    assert entry_of(target, made.id).scores == entry_of(hub, made.id).scores
    with pytest.raises(DigestMismatchError):
        made.with_scores(
            ScoreFile.of(made.id, "sha256:" + "0" * 64, (gpqa("sha256:" + "0" * 64),)), what="f"
        )
