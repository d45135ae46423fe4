import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted_hub import CALLS, Injection, killed_at, raise_error

from oscar_zoo.artifact.durable import STORE, held
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import StorageError
from oscar_zoo.registry.gc import HUB_METADATA_SECONDS, gc
from oscar_zoo.registry.store import Store

ID, OTHER = ArtifactId("model", "tag"), ArtifactId("other", "tag")
KEPT = {"k.pt": b"keys" * 50, "v.pt": b"values" * 50}
LOST = {"k.pt": b"lost keys", "v.pt": KEPT["v.pt"]}


def age(path: Path, seconds: float = 7200) -> Path:
    """Make `path` look `seconds` old."""
    os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)
    return path


def forget(store: Store, artifact: ArtifactId, *, seconds: float = 7200) -> Path:
    """Take the mark off an entry, as if a process had died over it; returns its folder."""
    record = store.find(artifact)
    assert record is not None
    (record.path / ".complete").unlink()
    return age(record.path, seconds)


def litter(store: Store) -> dict[str, int]:
    """A good entry and one of everything that nothing needs: kind -> how many."""
    store.put(ID, KEPT, source="s")
    store.put(OTHER, LOST, source="s")
    forget(store, OTHER)
    for folder in (
        store.root,
        store.blobs,
        store.artifacts,
        store.root / "hubs/hub" / ("d" * 40) / "files",
    ):
        leftover = folder / ".tmp.0123"
        leftover.mkdir(parents=True)
        (leftover / "half").write_bytes(b"x" * 1000)
        age(leftover)
    orphan = store.blobs / ("0" * 64)
    orphan.write_bytes(b"y" * 500)
    (store.artifacts / ("a" * 64)).mkdir()
    old = store.root / "hubs" / "hub" / ("c" * 40)
    old.mkdir()
    (old / "listing.json").write_bytes(b"z" * 100)
    age(old, HUB_METADATA_SECONDS + 3600)
    return {"leftover": 4, "incomplete entry": 1, "empty folder": 2, "blob": 2, "hub metadata": 1}


def kinds(store: Store, **options: bool) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in gc(store, **options).removed:
        found[item.kind] = found.get(item.kind, 0) + 1
    return found


def disk_use(folder: Path) -> int:
    """Bytes of all files, each counted once."""
    files = [path.lstat() for path in folder.rglob("*") if path.is_file()]
    return sum({(s.st_dev, s.st_ino): s.st_size for s in files}.values())


def test_what_nothing_needs_goes_and_the_rest_stays(store: Store) -> None:
    expected = litter(store)
    before = disk_use(store.root)
    planned = gc(store, dry_run=True)
    assert kinds(store, dry_run=True) == expected and disk_use(store.root) == before
    done = gc(store)
    assert done == planned
    assert done.freed == before - disk_use(store.root) > 3000 + 500 + 100 + len(LOST["k.pt"])
    assert [record.id for record in store.installed()] == [ID]
    record = store.find(ID)
    assert record is not None and store.open(record.digest).files == KEPT
    assert gc(store).removed == ()
    assert sorted(p.name for p in store.blobs.iterdir()) == sorted(f.sha256 for f in record.files)


def test_what_may_be_in_use_stays(store: Store) -> None:
    store.put(ID, KEPT, source="s")
    store.put(OTHER, LOST, source="s")
    forget(store, OTHER, seconds=3000)
    for path in (
        store.root / ".tmp.young",
        store.root / "hubs/hub" / ("c" * 40),
        store.root / "hubs/hub/main",
    ):
        path.mkdir(parents=True)
    age(store.root / "hubs/hub/main", 10 * HUB_METADATA_SECONDS)
    age(store.root / "hubs/hub" / ("c" * 40), HUB_METADATA_SECONDS - 3600)
    (age(store.blobs) / "notes.txt").write_text("of somebody")
    assert gc(store).removed == ()


def test_links_are_removed_and_never_followed(store: Store, tmp_path: Path) -> None:
    store.put(ID, KEPT, source="s")
    outside, tree = tmp_path / "outside", store.artifacts / ".tmp.tree"
    outside.mkdir()
    tree.mkdir()
    (outside / "precious").write_bytes(b"p")
    for link in (store.root / ".tmp.link", tree / "link", store.artifacts / ("b" * 64)):
        link.symlink_to(outside)
    (store.blobs / ("b" * 64)).symlink_to(outside / "precious")
    for path in (store.root / ".tmp.link", tree):
        age(path)
    gc(store)
    assert (outside / "precious").read_bytes() == b"p"
    assert not os.path.lexists(store.root / ".tmp.link") and not tree.exists()


def test_an_entry_with_a_rotten_record_goes_and_one_of_another_version_stays(store: Store) -> None:
    for artifact, record in ((ID, b"rot"), (OTHER, b'{"schema": "oscar-zoo.record/9"}')):
        path = store.put(artifact, KEPT | {"id": str(artifact).encode()}, source="s").record.path
        (path / "record.json").chmod(0o600)
        (path / "record.json").write_bytes(record)
        age(path)
    assert kinds(store) == {"incomplete entry": 1, "empty folder": 1, "blob": 1}
    assert len(list(store.entry_folders())) == 1


@pytest.mark.parametrize("why", ["busy", "no locks"])
def test_unlocked_young_blobs_stay(store: Store, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    store.put(ID, KEPT, source="s")
    for name, seconds in (("0", 0.0), ("1", 7200.0)):
        blob = store.blobs / (name * 64)
        blob.write_bytes(b"x")
        age(blob, seconds)
    if why == "no locks":
        monkeypatch.setattr(fcntl, "flock", lambda *_: raise_error(errno.ENOLCK)())
    with held(STORE, shared=True, root=store.root):
        done = gc(store, patience=0)
    assert not done.exclusive and [item.path.name for item in done.removed] == ["1" * 64]
    monkeypatch.undo()
    assert gc(Store(store.root)).exclusive


def test_a_store_that_others_can_write_is_left_alone(store: Store) -> None:
    litter(store)
    store.root.chmod(0o770)
    before = disk_use(store.root)
    with pytest.raises(StorageError, match="0770"):
        gc(store)
    assert disk_use(store.root) == before


def test_an_entry_that_came_back_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(ID, KEPT, source="s")
    forget(store, ID)
    listed = os.listdir

    def put_first(folder: int) -> list[str]:
        monkeypatch.setattr(os, "listdir", listed)
        store.put(ID, KEPT, source="s")
        return listed(folder)

    monkeypatch.setattr(os, "listdir", put_first)
    gc(store)
    assert os.listdir is listed
    record = store.find(ID)
    assert record is not None and store.open(record.digest).files == KEPT


@pytest.fixture
def removing_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the calls that remove things, too."""
    monkeypatch.setattr("scripted_hub.CALLS", (*CALLS, "unlink", "rmdir", "listdir"))


def assert_usable(store: Store) -> None:
    """The good entry is there, a new one can be stored, and the next run cleans up."""
    record = store.find(ID)
    assert record is not None and store.open(record.digest).files == KEPT
    assert store.put(OTHER, LOST, source="s").files == LOST
    gc(store)
    assert gc(store).removed == ()


@pytest.mark.usefixtures("removing_calls")
@pytest.mark.parametrize("what", ["killed", errno.EIO, errno.EACCES])
def test_stopped_anywhere_it_leaves_a_usable_store(tmp_path: Path, what: str | int) -> None:
    failures = 0
    for number in range(1, 200):
        store = Store(tmp_path / str(number))
        litter(store)
        if isinstance(what, str):
            stopped = killed_at(number, lambda store=store: gc(store))  # type: ignore[misc]
        else:
            injection = Injection(number, raise_error(what))
            try:
                with injection.active():
                    gc(store)
            except StorageError as error:
                failures += 1
                assert "\n" not in error.message and error.hint
            stopped = injection.fired
        assert_usable(store)
        if not stopped:
            break
    assert 20 < number < 199 and (failures > 10 or what == "killed")


WORKER = """
import select
import sys
from pathlib import Path
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.gc import gc
from oscar_zoo.artifact.durable import STORE, held
from oscar_zoo.registry.store import Store

store, role, locked = Store(Path(sys.argv[1])), sys.argv[2], sys.argv[3] == "locked"
if role == "gc":
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        gc(store, patience=0.05)
else:
    sys.stdin.readline()
    for number in range(20):
        for name in (f"{role}-{number}", f"shared-{number}"):
            files = {"k.pt": b"%d" % number, "v.pt": name.encode()}
            for _ in range(2):
                if locked:
                    with held(STORE, shared=True, root=store.root):
                        stored = store.put(ArtifactId("model", name), files, source="s")
                else:
                    stored = store.put(ArtifactId("model", name), files, source="s")
                assert stored.files == files
                assert store.open(stored.record.digest, stored.record.id).files == files
"""


@pytest.mark.parametrize("locks", ["locked", "without locks"])
def test_it_runs_beside_processes_that_store_and_open(store: Store, locks: str) -> None:
    def start(role: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, str(store.root), role, locks],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    cleaner, workers = start("gc"), [start(role) for role in "abc"]
    assert cleaner.stdout is not None and cleaner.stdout.readline() == "ready\n"
    try:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            assert (worker.communicate(timeout=300)[1], worker.returncode) == ("", 0)
    finally:
        assert (cleaner.communicate("stop\n", timeout=300)[1], cleaner.returncode) == ("", 0)
    names = {record.id.tag for record in store.installed()}
    assert names == {f"{role}-{n}" for role in ("a", "b", "c", "shared") for n in range(20)}
    for record in store.installed():
        assert store.open(record.digest, record.id).files["v.pt"] == record.id.tag.encode()
