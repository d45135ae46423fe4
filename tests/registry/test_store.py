import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest
from scripted_hub import Injection, killed_at, raise_error
from tiny_artifacts import artifact_files

from oscar_zoo import errors
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.store import Store

ID = ArtifactId("tiny-qwen3-hard", "seq512_prompt2_group64")
PLAIN = {"k.pt": b"keys" * 50, "v.pt": b"values" * 50}

symlink = os.symlink


@pytest.fixture(autouse=True, params=["local disk", "no flock, no symbolic links"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test once more on a file system without locks and symbolic links."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    if request.param != "local disk":
        monkeypatch.setattr(fcntl, "flock", refuse)
        monkeypatch.setattr(os, "symlink", refuse)


def flip(path: Path) -> None:
    """Change one byte of a read-only file."""
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_what_was_put_is_found_and_opened(store: Store) -> None:
    files = artifact_files()
    put = store.put(ID, files, source="file:/zoo")
    record = store.find(ArtifactId("TINY-qwen3-hard", ID.tag))
    assert record is not None
    assert store.installed() == (record,)
    assert (record.id, record.source) == (ID, "file:/zoo")
    opened = store.open(record.digest)
    assert opened.files == files == put.files
    assert opened.manifest is not None
    assert opened.manifest.digest == record.digest
    assert set(opened.payload) == set(files) - {"oscar.json"}


def test_blobs_are_read_only_files_in_private_folders(store: Store) -> None:
    record, blobs = store.put(ID, PLAIN, source="s").record, store.root / "blobs" / "sha256"
    for entry in record.files:
        assert stat.S_IMODE((blobs / entry.sha256).stat().st_mode) == 0o444
        assert (blobs / entry.sha256).samefile(record.path / entry.path)
    for folder in (store.root, blobs, store.root / "artifacts", record.path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_two_ids_may_share_their_bytes(store: Store) -> None:
    other = ArtifactId("tiny-qwen3", "hadamard")
    one, two = (store.put(name, PLAIN, source="s").record for name in (ID, other))
    assert one.digest == two.digest
    assert store.open(one.digest, ID).record.id == ID
    blobs = set(store.blobs.iterdir())
    store.remove(one)
    assert store.installed() == (two,)
    assert store.open(two.digest, other).files == PLAIN and set(store.blobs.iterdir()) == blobs
    store.remove(two)
    assert store.installed() == ()
    assert list(store.blobs.iterdir()) == list(store.artifacts.iterdir()) == []
    store.remove(two)  # as a second process does that saw it too


@pytest.mark.parametrize("name", ["k_rotation_qqt_r_h_pbr.pt", "oscar.json", "blob"])
def test_a_flipped_byte_is_seen_at_its_next_use_and_put_repairs(store: Store, name: str) -> None:
    record = store.put(ID, artifact_files(), source="s").record
    blob = store.blobs / record.files[0].sha256
    flip(blob if name == "blob" else record.path / name)
    with pytest.raises(errors.DigestMismatchError, match=None if name == "blob" else name):
        store.open(record.digest)
    assert store.put(ID, artifact_files(), source="s").files == artifact_files()
    assert store.open(record.digest).files == artifact_files()


def test_a_missing_file_and_a_link_in_place_of_one_are_seen(store: Store, tmp_path: Path) -> None:
    record = store.put(ID, PLAIN, source="s").record
    target = record.path / "k.pt"
    target.unlink()
    with pytest.raises(errors.DigestMismatchError):
        store.open(record.digest)
    (tmp_path / "same").write_bytes(PLAIN["k.pt"])
    symlink(tmp_path / "same", target)
    with pytest.raises(errors.DigestMismatchError):
        store.open(record.digest)


@pytest.mark.parametrize("broken", [b"", b"{}", b"not json", b'{"schema": "oscar-zoo.record/2"}'])
def test_an_entry_with_a_bad_record_is_absent_and_put_repairs(store: Store, broken: bytes) -> None:
    record = store.put(ID, PLAIN, source="s").record
    path = record.path / "record.json"
    path.chmod(0o600)
    path.write_bytes(broken)
    assert store.installed() == ()
    assert store.put(ID, PLAIN, source="s").record.digest == record.digest


def test_a_record_moved_to_another_digest_is_no_entry(store: Store) -> None:
    record = store.put(ID, PLAIN, source="s").record
    record.path.parent.rename(record.path.parent.parent / ("0" * 64))
    assert store.installed() == ()


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_store_that_others_can_write_is_refused(store: Store, mode: int) -> None:
    store.put(ID, PLAIN, source="s")
    store.root.chmod(mode)
    for use in (store.installed, lambda: store.put(ID, PLAIN, source="s")):
        with pytest.raises(errors.StorageError, match=f"{mode:04o}") as caught:
            use()
        assert "chmod 700" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["../k.pt", "a/b.pt", ".complete", "record.json", "Record.JSON"])
def test_unsafe_file_names_are_refused(store: Store, name: str) -> None:
    with pytest.raises(errors.InvalidName):
        store.put(ID, {name: b"x"}, source="s")
    assert not store.root.exists()


def test_no_hard_links_make_copies(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    record = store.put(ID, PLAIN, source="s").record
    assert store.open(record.digest).files == PLAIN
    flip(store.root / "blobs" / "sha256" / record.files[0].sha256)
    assert store.open(record.digest).files == PLAIN


def test_blobs_of_an_unstored_entry_go_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(ID, {"k.pt": PLAIN["k.pt"]}, source="s")
    monkeypatch.setattr(durable, "move_into_place", lambda *_: raise_error(errno.ENOSPC)())
    with pytest.raises(errors.StorageError, match="No space"):
        store.put(ArtifactId("other", "tag"), PLAIN, source="s")
    assert [path.read_bytes() for path in store.blobs.iterdir()] == [PLAIN["k.pt"]]


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failing_disk_leaves_nothing_or_all(tmp_path: Path, code: int, stays: bool) -> None:
    for number in range(1, 200):
        store = Store(tmp_path / str(number))
        injection = Injection(number, raise_error(code), stays=stays)
        try:
            with injection.active():
                store.put(ID, PLAIN, source="s")
        except errors.StorageError as error:
            assert "\n" not in error.message
            assert error.hint
        for record in store.installed():
            assert store.open(record.digest, record.id).files == PLAIN
        assert store.put(ID, PLAIN, source="s").files == PLAIN
        if not injection.fired:
            break
    assert 30 < number < 199


@pytest.mark.parametrize("before", ["empty", "rotten"])
def test_a_killed_put_leaves_nothing_or_everything(tmp_path: Path, before: str) -> None:
    for number in range(1, 200):
        store = Store(tmp_path / str(number))
        if before == "rotten":
            flip(store.put(ID, PLAIN, source="s").record.path / "k.pt")
        killed = killed_at(number, lambda store=store: store.put(ID, PLAIN, source="s"))  # type: ignore[misc]
        for record in store.installed():
            try:
                assert store.open(record.digest).files == PLAIN
            except errors.DigestMismatchError:
                assert before == "rotten"
        assert store.put(ID, PLAIN, source="s").files == PLAIN
        if not killed:
            break
    assert 30 < number < 199


def test_the_folder_of_a_digest_may_go_early(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    place, removed = durable.move_into_place, []

    def remove_first(staged: Path, target: Path) -> bool:
        if not removed:
            target.parent.rmdir()
            removed.append(target.parent)
        return place(staged, target)

    monkeypatch.setattr(durable, "move_into_place", remove_first)
    assert store.put(ID, PLAIN, source="s").files == PLAIN
    assert removed


@pytest.mark.parametrize("depth", range(4))
def test_no_link_is_written_or_read_through(store: Store, tmp_path: Path, depth: int) -> None:
    """Blobs, entries, the folder of a digest, and an entry; the root may be one."""
    record = store.put(ID, PLAIN, source="s").record
    place = (store.blobs, store.artifacts, record.path.parent, record.path)[depth]
    outside = tmp_path / "outside"
    place.rename(outside)
    symlink(outside, place)
    before = sorted(outside.rglob("*"))
    with pytest.raises(errors.MalformedFile):
        store.put(ID, PLAIN | {"more.pt": b"x"} if depth < 2 else PLAIN, source="s")
    if depth > 1:
        with pytest.raises(errors.ArtifactNotFound):
            store.open(record.digest)
    assert sorted(outside.rglob("*")) == before
