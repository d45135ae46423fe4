import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest
from hub_uses import put_version as put
from scripted_hub import Injection, killed_at, raise_error

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import InvalidName, MalformedFile, PathNotFound, StaleRevision, StorageError
from oscar_zoo.registry.hubs import local
from oscar_zoo.registry.hubs.base import Change, Commit
from oscar_zoo.registry.hubs.local import LocalHub

ID = ArtifactId("Model", "tag")
ROOT = {"index.json": b"one", "README.md": b"card"}
FILES = {"k.pt": b"keys" * 100, "v.pt": b"values" * 100, "oscar.json": b"{}"}


@pytest.fixture
def hub(tmp_path: Path) -> LocalHub:
    return LocalHub(tmp_path / "hub", must_exist=False)


def temps(hub: LocalHub) -> list[str]:
    return [path.name for path in hub.root.rglob(".tmp.*")]


def listed(hub: LocalHub, artifact: ArtifactId = ID) -> dict[str, str | None]:
    return {file.path: file.sha256 for file in hub.files(artifact)}


def test_what_was_published_is_listed_and_fetched(hub: LocalHub) -> None:
    seen: list[tuple[str, int, int]] = []
    assert hub.artifacts() == ()
    put(hub, ID, FILES)
    assert hub.artifacts() == (ID,)
    assert listed(hub) == {name: sha256_hex(data) for name, data in FILES.items()}
    got = hub.fetch(ID, "k.pt", limit=400, progress=lambda *call: seen.append(call))
    assert got == FILES["k.pt"]
    assert seen == [("k.pt", 400, 400)]
    assert temps(hub) == []


def test_a_commit_writes_the_root_files_and_moves_the_revision(hub: LocalHub) -> None:
    assert (hub.root_file("index.json"), hub.root_file("README.md")) == (None, None)
    assert hub.revision == sha256_hex(b"")
    root = {"index.json": b"one", "README.md": b"# card"}
    first = hub.commit(Change(ID, FILES, root, hub.revision, "Publish it"))
    assert first == Commit(hub.revision)
    assert hub.revision == sha256_hex(b"one")
    second = hub.commit(Change(None, {}, {"index.json": b"two"}, hub.revision, "Yank it"))
    assert second.revision == sha256_hex(b"two")
    assert (hub.root_file("index.json"), hub.root_file("README.md")) == (b"two", b"# card")
    assert hub.artifacts() == (ID,)
    assert stat.S_IMODE((hub.root / "index.json").stat().st_mode) == 0o644


def test_a_view_stays_what_it_was_until_it_is_refreshed(hub: LocalHub) -> None:
    put(hub, ID, FILES, root={"index.json": b"one"})
    other = LocalHub(hub.root)
    revision = other.revision
    put(hub, ArtifactId("Model", "next"), FILES, root={"index.json": b"two"})
    assert (other.revision, other.root_file("index.json")) == (revision, b"one")
    with pytest.raises(StaleRevision, match=str(hub.root)):
        other.commit(
            Change(ArtifactId("Model", "third"), FILES, {"index.json": b"three"}, revision, "Add")
        )
    assert LocalHub(hub.root).root_file("index.json") == b"two"
    assert len(hub.artifacts()) == 2
    other.refresh()
    assert (other.revision, other.root_file("index.json")) == (hub.revision, b"two")


@pytest.mark.parametrize("files", [FILES, {**FILES, "k.pt": b"other"}, {"more.pt": b""}])
@pytest.mark.parametrize("artifact", [ID, ArtifactId("model", "TAG")])
def test_a_version_is_never_written_again(
    hub: LocalHub, artifact: ArtifactId, files: dict[str, bytes]
) -> None:
    put(hub, ID, FILES, root={"index.json": b"one"})
    inode = (hub.root / "Model" / "tag").stat().st_ino
    with pytest.raises(StaleRevision):
        put(hub, artifact, files, root={"index.json": b"two", "README.md": b"two"})
    assert (hub.root / "Model" / "tag").stat().st_ino == inode
    assert listed(hub) == {name: sha256_hex(data) for name, data in FILES.items()}
    assert (hub.root_file("index.json"), hub.root_file("README.md")) == (b"one", None)
    assert temps(hub) == []


def test_a_writer_waits_for_its_turn(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, ID, FILES)
    waits: list[float] = []
    with (hub.root / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def let_go(seconds: float) -> None:
            waits.append(seconds)
            fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", let_go)
        put(hub, ArtifactId("Model", "next"), FILES)
    assert len(waits) == 1


def test_a_writer_without_a_turn_says_so(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, ID, FILES)
    monkeypatch.setattr(local, "_LOCK_SECONDS", -1)
    with (hub.root / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another process"):
            put(hub, ArtifactId("Model", "next"), FILES)
    assert hub.artifacts() == (ID,)


def test_file_systems_may_have_no_locks(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: object, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    put(hub, ID, FILES, root={"index.json": b"one"})
    assert hub.artifacts() == (ID,)


def test_a_folder_of_plain_files_is_a_hub(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B" / "seq1_prompt1_group128"
    folder.mkdir(parents=True)
    (folder / "k.pt").write_bytes(b"1")
    (folder / ".hidden").write_bytes(b"2")
    (tmp_path / "README.md").write_text("not an artifact")
    (tmp_path / "Qwen3-8B" / "empty").mkdir()
    (tmp_path / ".tmp.0").mkdir()
    hub = LocalHub(tmp_path)
    assert hub.artifacts() == (ArtifactId("Qwen3-8B", "seq1_prompt1_group128"),)
    assert [f.path for f in hub.files(hub.artifacts()[0])] == ["k.pt"]


def test_a_missing_folder_is_an_error_unless_it_is_the_default_zoo(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match="nowhere"):
        LocalHub(tmp_path / "nowhere").artifacts()
    assert LocalHub(tmp_path / "nowhere", must_exist=False).artifacts() == ()
    assert not (tmp_path / "nowhere").exists()


def test_links_are_not_followed(hub: LocalHub, tmp_path: Path) -> None:
    put(hub, ID, FILES)
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (hub.root / "Model" / "tag" / "link.pt").symlink_to(secret)
    (hub.root / "Model" / "linked").symlink_to(hub.root / "Model" / "tag")
    (hub.root / "Linked").symlink_to(hub.root / "Model")
    assert hub.artifacts() == (ID,)
    with pytest.raises(MalformedFile):
        hub.files(ID)
    with pytest.raises(MalformedFile):
        hub.fetch(ID, "link.pt", limit=100)
    for artifact in (ArtifactId("Model", "linked"), ArtifactId("Linked", "tag")):
        with pytest.raises(MalformedFile):
            hub.fetch(artifact, "k.pt", limit=1000)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/b", "..", ".hidden", "k.pt\n", "con.pt", ""]
)
def test_unsafe_names_are_refused(hub: LocalHub, name: str) -> None:
    put(hub, ID, FILES)
    with pytest.raises(InvalidName):
        hub.fetch(ID, name, limit=100)
    with pytest.raises(InvalidName):
        put(hub, ArtifactId("Model", "other"), {name: b"x"})
    with pytest.raises(InvalidName):
        hub.files(ArtifactId("Model", name))
    assert hub.artifacts() == (ID,)


def test_a_file_longer_than_listed_and_a_pipe_are_refused(hub: LocalHub) -> None:
    put(hub, ID, FILES)
    with pytest.raises(MalformedFile) as caught:
        hub.fetch(ID, "k.pt", limit=399)
    assert caught.value.reason == "file.size"
    os.mkfifo(hub.root / "Model" / "tag" / "pipe.pt")
    with pytest.raises(MalformedFile):
        hub.fetch(ID, "pipe.pt", limit=100)


def complete(hub: LocalHub) -> bool:
    """Whether everything is there; each part is whole or absent, and the index comes last."""
    hub.refresh()
    there, index, card = hub.artifacts(), hub.root_file("index.json"), hub.root_file("README.md")
    assert there in ((), (ID,))
    assert index in (None, b"one") and card in (None, b"card")
    if there:
        assert listed(hub) == {name: sha256_hex(data) for name, data in FILES.items()}
    assert index is None or (there and card is not None)
    return bool(there) and index is not None and card is not None


def publish_again(hub: LocalHub) -> None:
    """What a second run does: the version where it is absent, and the root files."""
    if hub.artifacts():
        hub.commit(Change(None, {}, ROOT, hub.revision, "Repair"))
    else:
        put(hub, ID, FILES, root=ROOT)


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failing_disk_leaves_nothing_or_all(tmp_path: Path, code: int, stays: bool) -> None:
    for number in range(1, 200):
        hub = LocalHub(tmp_path / str(number), must_exist=False)
        injection = Injection(number, raise_error(code), stays=stays)
        try:
            with injection.active():
                put(hub, ID, FILES, root=ROOT)
        except StorageError as error:
            assert os.strerror(code) in error.message
            assert error.hint
        complete(hub)
        publish_again(hub)
        assert complete(hub)
        if not injection.fired:
            break
    assert 30 < number < 199


def test_a_killed_publisher_leaves_nothing_or_everything(tmp_path: Path) -> None:
    for number in range(1, 200):
        hub = LocalHub(tmp_path / str(number), must_exist=False)
        killed = killed_at(number, lambda hub=hub: put(hub, ID, FILES, root=ROOT))  # type: ignore[misc]
        complete(hub)
        publish_again(hub)
        assert complete(hub)
        if not killed:
            break
    assert 30 < number < 199


@pytest.mark.parametrize("where", ["Model", "Model/tag"])
@pytest.mark.parametrize("leads", [True, False])
def test_nothing_is_written_through_a_link(
    hub: LocalHub, tmp_path: Path, where: str, *, leads: bool
) -> None:
    outside = tmp_path / "outside"
    (hub.root / where).parent.mkdir(parents=True)
    (hub.root / where).symlink_to(outside)
    if leads:
        outside.mkdir()
    before = sorted(hub.root.rglob("*"))
    with pytest.raises(MalformedFile):
        put(hub, ID, FILES)
    assert sorted(hub.root.rglob("*")) == before
    assert not leads or not list(outside.iterdir())
