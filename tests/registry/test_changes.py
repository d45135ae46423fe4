"""Against other writers, lost replies and failing tags: `publish` on real folder hubs that
misbehave in between."""

from pathlib import Path
from typing import Any

import pytest
from hub_uses import HARD, publish, put_version
from scripted_hub import ScriptedHub, after, index_of, lose_reply, lose_reply_and_die, lose_request
from tiny_artifacts import FILE_NAME, K_NAME, V_NAME, artifact_files, write_folder

from oscar_zoo import errors
from oscar_zoo.registry import changes
from oscar_zoo.registry.hubs.base import Change
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index

TAG = f"oz-{HARD.model}-{HARD.tag}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "out", artifact_files())


def other_version(tmp_path: Path) -> Path:
    """The folder of another artifact."""
    return write_folder(tmp_path / "other", artifact_files(artifact="tiny-qwen3-hard/other"))


def test_one_publish_is_one_commit_and_a_tag_without_a_slash(tmp_path: Path, folder: Path) -> None:
    hub = ScriptedHub(tmp_path / "hub")
    result = publish(folder, hub)
    (change,) = hub.commits
    assert change.artifact == HARD and set(change.files) == {K_NAME, V_NAME, FILE_NAME}
    assert set(change.root) == {"index.json", "README.md"}
    assert change.message == f"Publish {HARD} ({result.digest[:19]})"
    assert (result.tag, hub.tags) == (TAG, {TAG: result.revision})


def meanwhile(tmp_path: Path, rival: Path) -> ScriptedHub:
    """A hub on which somebody publishes `rival` just before the first commit."""
    root = tmp_path / "hub"
    return ScriptedHub(root, after(lambda: publish(rival, LocalHub(root, must_exist=False))))


def test_another_artifact_published_in_between_is_kept(tmp_path: Path, folder: Path) -> None:
    hub = meanwhile(tmp_path, other_version(tmp_path))
    assert not publish(folder, hub).already_published
    assert [e.id for e in index_of(hub).artifacts] == ["tiny-qwen3-hard/other", str(HARD)]
    assert index_of(hub).serial == 2
    assert "other" in (tmp_path / "hub/README.md").read_text()


def test_the_same_version_published_in_between_is_success(tmp_path: Path, folder: Path) -> None:
    hub = meanwhile(tmp_path, folder)
    assert publish(folder, hub).already_published
    assert index_of(hub).serial == 1


def test_another_version_of_the_id_published_in_between_wins(tmp_path: Path, folder: Path) -> None:
    hub = meanwhile(tmp_path, write_folder(tmp_path / "rival", artifact_files(seed=1)))
    with pytest.raises(errors.VersionExists):
        publish(folder, hub)
    assert hub.fetch(HARD, K_NAME, limit=1 << 20) == artifact_files(seed=1)[K_NAME]


def test_a_hub_that_never_stands_still_is_given_up(tmp_path: Path, folder: Path) -> None:
    def elsewhere() -> None:
        target = LocalHub(tmp_path / "hub", must_exist=False)
        serial = index_of(target).serial + 1
        index = Index(schema="oscar-zoo.index/1", serial=serial, artifacts=())
        root = {"index.json": index.to_bytes()}
        target.commit(Change(None, {}, root, target.revision, "busy"))

    hub = ScriptedHub(tmp_path / "hub", *[after(elsewhere)] * 9)
    with pytest.raises(errors.StaleRevision):
        publish(folder, hub)
    assert len(hub.commits) == changes.ATTEMPTS
    assert hub.folder.artifacts() == ()


def test_a_lost_reply_is_found_out_by_reading(tmp_path: Path, folder: Path) -> None:
    hub = ScriptedHub(tmp_path / "hub", lose_reply)
    result = publish(folder, hub)
    assert (result.already_published, result.tag) == (False, TAG)
    assert len(hub.commits) == 1
    assert index_of(hub).serial == 1


def test_a_lost_request_is_sent_again_but_not_for_ever(tmp_path: Path, folder: Path) -> None:
    hub = ScriptedHub(tmp_path / "one", lose_request, lose_request)
    assert not publish(folder, hub).already_published
    assert (len(hub.commits), index_of(hub).serial) == (1, 1)
    hub = ScriptedHub(tmp_path / "two", *[lose_request] * 9)
    with pytest.raises(errors.HubUnreachable):
        publish(folder, hub)
    assert len(hub.events) == 9 - changes.ATTEMPTS


def test_a_lost_reply_is_unknown_and_can_be_repeated(tmp_path: Path, folder: Path) -> None:
    hub = ScriptedHub(tmp_path / "hub", lose_reply_and_die)
    with pytest.raises(errors.NetworkError, match="not known whether") as caught:
        publish(folder, hub)
    assert "safe" in (caught.value.hint or "") and "org/zoo" in caught.value.message
    hub.down = None
    again = publish(folder, hub)
    assert (again.already_published, again.tag) == (True, TAG)
    assert len(hub.commits) == 1


def test_a_hub_down_from_the_start_is_not_said_to_be_unknown(tmp_path: Path, folder: Path) -> None:
    hub = ScriptedHub(tmp_path / "hub")
    hub.down = errors.HubUnreachable.for_hub(hub.title, "connection refused")
    with pytest.raises(errors.HubUnreachable, match="connection refused"):
        publish(folder, hub)


def test_what_cannot_be_read_back_is_a_repeatable_error(tmp_path: Path, folder: Path) -> None:
    def answers_and_dies(hub: ScriptedHub, change: Change) -> Any:
        commit = hub.write(change)
        hub.down = errors.HubUnreachable.for_hub(hub.title, "connection refused")
        return commit

    hub = ScriptedHub(tmp_path / "hub", answers_and_dies)
    with pytest.raises(errors.NetworkError, match="could not be read back"):
        publish(folder, hub)
    hub.down = None
    assert publish(folder, hub).already_published


def test_a_hub_that_stores_other_bytes_is_caught(tmp_path: Path, folder: Path) -> None:
    def rots(hub: ScriptedHub, change: Change) -> Any:
        commit = hub.write(change)
        path = hub.folder.root / str(HARD) / K_NAME
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        return commit

    with pytest.raises(errors.DigestMismatchError, match=K_NAME):
        publish(folder, ScriptedHub(tmp_path / "hub", rots))


@pytest.mark.parametrize(
    "refusal",
    [errors.Forbidden.for_hub("org/zoo", "tagging"), errors.HubUnreachable.for_hub("x", "reset")],
)
def test_a_tag_that_fails_is_a_warning_and_repaired_by_publishing_again(
    tmp_path: Path, folder: Path, refusal: Exception
) -> None:
    hub = ScriptedHub(tmp_path / "hub")
    hub.refuse_tag = refusal
    result = publish(folder, hub)
    assert result.tag is None and TAG in result.warnings[0] and "again" in result.warnings[0]
    hub.refuse_tag = None
    again = publish(folder, hub)
    assert again.already_published and again.warnings == ()
    assert again.tag == TAG and list(hub.tags) == [TAG]


def test_a_tag_of_an_earlier_commit_with_its_content_is_right(tmp_path: Path, folder: Path) -> None:
    hub = ScriptedHub(tmp_path / "hub")
    first = publish(folder, hub)
    publish(other_version(tmp_path), hub)
    again = publish(folder, hub)
    assert (again.tag, again.warnings) == (TAG, ())
    assert hub.tags[TAG] == first.revision != again.revision


def test_a_tag_of_other_content_is_a_warning(tmp_path: Path, folder: Path) -> None:
    class Retagged(ScriptedHub):
        def at(self, revision: str) -> Any:
            return LocalHub(tmp_path / "elsewhere", must_exist=False)

    put_version(LocalHub(tmp_path / "elsewhere", must_exist=False), HARD, artifact_files(seed=1))
    hub = Retagged(tmp_path / "hub")
    hub.refuse_tag = errors.ConflictError("the tag exists.")
    result = publish(folder, hub)
    assert result.tag is None and "other content" in result.warnings[0]
