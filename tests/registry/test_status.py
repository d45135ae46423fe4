"""What the index of a hub says of a version: yanked, deprecated, offered again, with scores. Only
index and card change."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hub_uses import HARD, publish, put_version
from measured_artifacts import gpqa, measured
from scripted_hub import index_of
from tiny_artifacts import artifact_files, payload, write_folder

from oscar_zoo import errors
from oscar_zoo.artifact.manifest import Status
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import IndexEntry
from oscar_zoo.registry.mirror import copy_all
from oscar_zoo.registry.publish import Publishable, publish_on
from oscar_zoo.registry.score_file import ScoreFile
from oscar_zoo.site.status import ChangedVersion, ScoredVersion, attach_scores, set_status

OTHER = "tiny-qwen3-hard:other"
BARE = ArtifactId("Bare", "tag")


@pytest.fixture
def hub(tmp_path: Path) -> LocalHub:
    """A hub with two published versions of one model, and one that is in no index."""
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    publish(write_folder(tmp_path / "one", artifact_files()), hub)
    other = artifact_files(artifact="tiny-qwen3-hard/other", seed=1)
    publish(write_folder(tmp_path / "two", other), hub)
    put_version(hub, BARE, payload(seed=2))
    return hub


def entry_of(hub: LocalHub, artifact: ArtifactId = HARD) -> IndexEntry:
    entry = index_of(hub).entry(artifact)
    assert entry is not None
    return entry


def versions(hub: LocalHub) -> dict[str, bytes]:
    """Every file that is not in the root."""
    paths = [path for path in hub.root.rglob("*.*") if path.is_file() and path.parent != hub.root]
    return {str(path): path.read_bytes() for path in paths}


def yank(hub: LocalHub, name: str = HARD.reference, reason: str = "wrong data") -> ChangedVersion:
    return set_status(hub, name, "yanked", reason=reason)


def test_a_yank_changes_the_index_and_nothing_else(hub: LocalHub) -> None:
    files, before, serial = versions(hub), entry_of(hub), index_of(hub).serial
    began = datetime.now(UTC)
    result = yank(hub)
    assert (result.hub, result.id, result.changed) == (hub.name, HARD, True)
    assert result.serial == index_of(hub).serial == serial + 1
    days = [moment.strftime("%Y-%m-%d") for moment in (began, datetime.now(UTC))]
    assert result.status in [Status(state="yanked", reason="wrong data", date=day) for day in days]
    assert versions(hub) == files
    assert entry_of(hub) == before.model_copy(update={"status": result.status})
    assert "yanked: wrong data" in (hub.root / "README.md").read_text()


def test_the_state_it_has_already_is_success_and_writes_nothing(hub: LocalHub) -> None:
    serial = yank(hub).serial
    again = yank(hub, reason="  wrong\n data ")
    assert (again.changed, again.serial) == (False, serial)
    assert yank(hub, reason="another reason").changed
    assert not set_status(hub, OTHER, "active").changed
    assert index_of(hub).serial == serial + 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reason": None}, errors.UsageError),
        ({"reason": "  "}, errors.UsageError),
        ({"reason": "old", "replaced_by": "tiny-qwen3-hard/OTHER"}, errors.UsageError),
        ({"reason": "old", "replaced_by": "tiny-qwen3-hard:missing"}, errors.ArtifactNotFound),
    ],
)
def test_a_reason_is_needed_and_a_version_cannot_replace_itself(
    hub: LocalHub, options: dict[str, Any], error: type[Exception]
) -> None:
    before = index_of(hub)
    for state in ("yanked", "deprecated"):
        with pytest.raises(error):
            set_status(hub, OTHER, state, **options)  # type: ignore[arg-type]
    assert index_of(hub) == before


def test_a_deprecated_version_names_what_to_use_instead(hub: LocalHub) -> None:
    result = set_status(hub, OTHER, "deprecated", reason="old", replaced_by=str(HARD))
    assert result.status.replaced_by == HARD.reference
    assert entry_of(hub, result.id).status == result.status


def test_an_artifact_that_is_in_no_index_gets_an_entry(hub: LocalHub) -> None:
    assert index_of(hub).entry(BARE) is None
    result, entry = yank(hub, "Bare:tag"), entry_of(hub, BARE)
    assert result.id == BARE
    assert (entry.digest, entry.manifest_sha256, entry.model) == (result.digest, None, None)
    assert {f.path: f.sha256 for f in entry.files} == {f.path: f.sha256 for f in hub.files(BARE)}


def test_a_version_is_named_by_its_reference_id_or_digest_in_any_case(hub: LocalHub) -> None:
    names = ("TINY-qwen3-hard:Other", "tiny-qwen3-hard/other", "oscar-zoo/tiny-qwen3-hard:other")
    entry = index_of(hub).entry(ArtifactId("tiny-qwen3-hard", "other"))
    assert entry is not None
    digests = (entry.digest, entry.digest[:19], f"tiny-qwen3-hard@{entry.digest[:20]}")
    for name in (OTHER, *names, *digests):
        assert yank(hub, name, reason=name).id == entry.artifact_id


def test_the_digest_of_two_versions_names_neither(hub: LocalHub) -> None:
    put_version(hub, "Bare/twin", payload(seed=2))
    twin = yank(hub, "Bare:twin").digest
    with pytest.raises(errors.AmbiguousName, match="Bare:twin"):
        yank(hub, twin)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tiny-qwen3-hard", errors.AmbiguousName),
        ("Bare", errors.UsageError),
        ("Bare:other", errors.ArtifactNotFound),
        ("nothing:tag", errors.ArtifactNotFound),
        ("other-org/tiny-qwen3-hard:other", errors.ArtifactNotFound),
        ("sha256:" + "0" * 64, errors.ArtifactNotFound),
        ("sha256:12", errors.InvalidName),
        ("a/b/c", errors.InvalidName),
    ],
)
def test_a_name_that_is_not_exactly_one_version_is_refused(
    hub: LocalHub, name: str, error: type[Exception]
) -> None:
    before, digest = index_of(hub), entry_of(hub).digest
    with pytest.raises(error):
        yank(hub, name)
    with pytest.raises(error):
        attach(hub, digest, gpqa(digest), name=name)
    assert index_of(hub) == before


def attach(hub: LocalHub, digest: str, *scores: Score, name: str = HARD.reference) -> ScoredVersion:
    file = ScoreFile.of(HARD, digest, scores)
    return attach_scores(hub, name, file, what="scores.json")


def test_scores_get_to_the_index_and_the_card_and_nowhere_else(hub: LocalHub) -> None:
    before, files = entry_of(hub), versions(hub)
    result = attach(hub, before.digest, measured(before.digest))
    assert entry_of(hub) == before.model_copy(update={"scores": (measured(before.digest),)})
    assert versions(hub) == files
    assert (result.id, result.changed, result.scores) == (HARD, True, entry_of(hub).scores)
    card = (hub.root / "README.md").read_text()
    assert "gpqa\\_diamond 55.00 ± 2.50 (BF16 56.50 ± 2.50), n 198, 2 runs, measured" in card


def test_the_same_scores_write_nothing_and_others_keep_the_earlier_ones(hub: LocalHub) -> None:
    digest = entry_of(hub).digest
    first = attach(hub, digest, measured(digest))
    again = attach(hub, digest, measured(digest).model_copy(update={"date": "2027-01-01"}))
    assert (first.changed, again.changed, again.serial) == (True, False, first.serial)
    result = attach(hub, digest, gpqa(digest, value=58.0))
    assert [entry.value for entry in result.scores[0].history] == [55.0]
    assert entry_of(hub).scores == result.scores


def test_a_version_without_an_entry_gets_one_for_its_scores(hub: LocalHub) -> None:
    digest = Version.of(BARE, payload(seed=2)).digest
    attach_scores(hub, "Bare:tag", ScoreFile.of(BARE, digest, (gpqa(digest),)), what="f")
    assert entry_of(hub, BARE).scores == (gpqa(digest),)


def test_scores_of_other_bytes_or_of_another_artifact_are_refused(hub: LocalHub) -> None:
    before, digest = entry_of(hub), "sha256:" + "0" * 64
    with pytest.raises(errors.DigestMismatchError, match=r"by scores\.json") as caught:
        attach(hub, digest, gpqa(digest))
    assert "oscar-zoo eval" in (caught.value.hint or "")
    file = ScoreFile.of(BARE, before.digest, (gpqa(before.digest),))
    with pytest.raises(errors.UsageError, match="scores of Bare:tag, not of"):
        attach_scores(hub, HARD.reference, file, what="f")
    assert entry_of(hub) == before


def test_publishing_attaches_and_mirroring_takes_them_along(hub: LocalHub, tmp_path: Path) -> None:
    files: dict[str, Any] = artifact_files(artifact="tiny-qwen3-hard/two", seed=1)
    made = Publishable.read(write_folder(tmp_path / "three", files))

    def scored(*scores: Score, digest: str = made.verified.digest) -> Publishable:
        return made.with_scores(ScoreFile.of(made.id, digest, scores), what="f")

    first = measured(made.verified.digest)
    publish_on(hub, scored(first))
    assert entry_of(hub, made.id).scores == (first,)
    again = publish_on(hub, scored(first.model_copy(update={"value": 56.0})))
    assert again.already_published and again.scores_updated
    assert [e.value for e in entry_of(hub, made.id).scores[0].history] == [55.0]
    target = LocalHub(tmp_path / "copy", must_exist=False)
    copy_all(hub, target, ["tiny-qwen3-hard:two"], create=True)
    assert entry_of(target, made.id).scores == entry_of(hub, made.id).scores
    wrong = "sha256:" + "0" * 64
    with pytest.raises(errors.DigestMismatchError):
        scored(gpqa(wrong), digest=wrong)
