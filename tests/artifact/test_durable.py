"""Files and folders appear whole or not at all, and a lock is held by one process."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.durable import held
from oscar_zoo.artifact.files import read_file
from oscar_zoo.errors import MalformedFile, StorageError


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data[:3])))
    durable.write_new(tmp_path / "file", b"0123456789", mode=0o444)
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_name_that_is_taken_is_never_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            durable.write_new(tmp_path / name, b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()


def test_a_staged_folder_goes_away_unless_it_was_moved(tmp_path: Path) -> None:
    with durable.staged_folder(tmp_path) as staged:
        durable.write_files(staged, {"a": b"1"})
    assert list(tmp_path.iterdir()) == []
    with durable.staged_folder(tmp_path) as staged:
        durable.write_files(staged, {"a": b"1"})
        assert durable.move_into_place(staged, tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_content_is_never_replaced_by_a_move(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "there"
    if kind == "folder":
        target.mkdir()
        (target / "old").write_bytes(b"old")
    elif kind == "file":
        target.write_bytes(b"old")
    else:
        target.symlink_to(tmp_path)
    with durable.staged_folder(tmp_path) as staged:
        durable.write_files(staged, {"a": b"1"})
        assert not durable.move_into_place(staged, target)
        assert (staged / "a").exists()
    assert target.is_symlink() == (kind == "link")
    assert not (target / "a").exists()


def left_by_a_killed_process(folder: Path) -> Path:
    """A file that a process wrote which is dead and reaped."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        path = durable.temp_path(folder)
        path.write_bytes(b"half")
        os.write(writer, path.name.encode())
        os._exit(9)
    os.waitpid(child, 0)
    name = os.read(reader, 200).decode()
    os.close(reader)
    os.close(writer)
    return folder / name


@pytest.mark.parametrize("how", ["replace_file", "staged_folder", "sweep"])
def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path, how: str) -> None:
    left = left_by_a_killed_process(tmp_path)
    others = [tmp_path / name for name in (".tmp.other-program", ".tmp.0123.py", "keep")]
    mine = [durable.temp_path(tmp_path), tmp_path / f".tmp.{'0' * 32}"]  # alive, and not known
    mine.append(tmp_path / f".tmp.{'f' * 8}.1.1.{'0' * 32}")  # of another machine
    for path in (*others, *mine):
        path.write_bytes(b"x")
    assert left.exists()
    if how == "replace_file":
        durable.replace_file(tmp_path / "new", b"new")
    elif how == "staged_folder":
        with durable.staged_folder(tmp_path):
            pass
    else:
        assert durable.sweep(tmp_path) == 1
    assert not left.exists()
    assert all(path.exists() for path in (*others, *mine))


def test_what_is_not_known_stays_for_an_hour_and_what_others_left_for_ever(tmp_path: Path) -> None:
    old = time.time() - 2 * durable.STALE_SECONDS
    unknown, foreign = tmp_path / f".tmp.{'0' * 32}", tmp_path / ".tmp.other-program"
    mine = durable.temp_path(tmp_path)
    place, pid, start, rest = mine.name.removeprefix(".tmp.").split(".")
    other = tmp_path / f".tmp.{place}.{pid}.{int(start) - 1}.{rest}"  # had the number of this one
    for path in (unknown, foreign, mine, other):
        path.write_bytes(b"x")
        os.utime(path, (old, old))
    durable.tidy(tmp_path)
    # this process still runs, however long it takes
    assert [path.exists() for path in (unknown, other, foreign, mine)] == [False, False, True, True]


def test_two_folders_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("staged", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    if not durable.exchange(tmp_path / "staged", tmp_path / "target"):
        pytest.skip("this file system cannot")
    assert (tmp_path / "target/file").read_text() == "staged"
    assert (tmp_path / "staged/file").read_text() == "target"
    assert not durable.exchange(tmp_path / "staged", tmp_path / "missing")
    assert (tmp_path / "staged").is_dir()


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (errno.EIO, "log"),
        (errno.EMFILE, "ulimit"),
        (errno.ENOSPC, "space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permissions"),
        (errno.EISDIR, "path"),
    ],
)
def test_every_error_of_a_disk_has_its_own_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, word: str
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError) as writing, durable.storage_errors("cannot write"):
        refuse()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError) as reading:
        read_file(tmp_path / "file")
    for caught in (writing, reading):
        assert word in (caught.value.hint or "")
        assert os.strerror(number) in caught.value.message
        assert ("permissions" in (caught.value.hint or "")) == (number == errno.EACCES)


def test_sweep_takes_only_old_leftovers_with_our_name(tmp_path: Path) -> None:
    for name in (".tmp.folder", "keep"):
        (tmp_path / name).mkdir()
    assert [durable.sweep(tmp_path), durable.sweep(tmp_path, older_than=-1)] == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    assert durable.sweep(tmp_path / "missing") == 0


HOLD = """
import sys
from oscar_zoo.artifact.durable import held
with held(sys.argv[1], shared=sys.argv[2] == "shared") as locked:
    print(locked, flush=True)
    sys.stdin.readline()
"""


@contextmanager
def holder(name: str, kind: str = "exclusive") -> Iterator[subprocess.Popen[str]]:
    """A child that holds the lock until its stdin gets a line or closes."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, name, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "True\n"
        yield child
    finally:
        child.communicate()


@pytest.mark.parametrize(
    ("kind", "name", "shared", "gets"),
    [
        ("exclusive", "a", False, False),
        ("exclusive", "a", True, False),
        ("exclusive", "b", False, True),
        ("shared", "a", True, True),
        ("shared", "a", False, False),
    ],
)
def test_who_gets_a_lock_beside_another(kind: str, name: str, shared: bool, gets: bool) -> None:
    with holder("a", kind), held(name, shared=shared, timeout=0.01) as locked:
        assert locked == gets
    with held("a", timeout=0) as locked:
        assert locked


def test_a_waiter_goes_on_when_the_holder_is_killed() -> None:
    got: list[bool] = []

    def wait() -> None:
        with held("a", timeout=60) as locked:
            got.append(locked)

    with holder("a") as child:
        waiter = threading.Thread(target=wait)
        waiter.start()
        child.kill()
        waiter.join(300)
    assert got == [True]


def test_ctrl_c_ends_the_wait_at_once_and_leaves_the_lock_free() -> None:
    code = (
        "import os, signal, threading\n"
        "from oscar_zoo.artifact.durable import held\n"
        "try:\n"
        "    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    with held('a', timeout=600): pass\n"
        "except KeyboardInterrupt: print('stopped')\n"
    )
    with holder("a"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
        )
    assert done.stdout == "stopped\n", done.stderr
    with held("a", timeout=0) as locked:
        assert locked


def test_a_child_forked_inside_does_not_keep_the_lock() -> None:
    read, write = os.pipe()
    with held("a"):
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0)
    with held("a", timeout=0) as locked:
        assert locked
    os.write(write, b"x")
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)


def test_lock_files_are_private_and_stay(own_state: Path, tmp_path: Path) -> None:
    for name in ("a", "a", "../b\0c\n"):
        with held(name), held(name, timeout=0, root=tmp_path) as of_another_store:
            assert of_another_store
    files = list((own_state / "cache" / "locks").iterdir())
    assert len(files) == 2 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_without_flock_the_body_runs_unlocked(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held("a", timeout=600) as locked:
        assert not locked


def test_a_link_in_place_of_the_folder_of_locks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache/locks").symlink_to(tmp_path / "outside")
    with pytest.raises(MalformedFile), held("x", root=tmp_path / "cache"):
        pass
    assert not [*(tmp_path / "outside").iterdir()]


@pytest.mark.parametrize("error", [BlockingIOError(errno.EAGAIN, "own"), SystemExit(143)])
def test_an_error_of_the_body_passes_and_frees_the_lock(error: BaseException) -> None:
    with pytest.raises(type(error)), held("a"):
        raise error
    with held("a", timeout=0) as locked:
        assert locked


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_in_the_way_gives_no_lock(own_state: Path, tmp_path: Path, kind: str) -> None:
    locks = own_state / "cache" / "locks"
    if kind == "file":
        locks.parent.mkdir()
        locks.write_bytes(b"a file in the way")
    else:
        with held("a"):
            (path,) = locks.iterdir()
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
    with held("a", timeout=0) as locked:
        assert not locked
    assert not (tmp_path / "elsewhere").exists()
