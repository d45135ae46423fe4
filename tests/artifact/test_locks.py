from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oscar_zoo.artifact.durable import held
from oscar_zoo.errors import MalformedFile

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


def test_one_process_holds_a_lock_and_the_next_gets_it_after_that() -> None:
    with holder("a"):
        with held("a", timeout=0) as locked:
            assert not locked
        with held("b", timeout=0) as locked:
            assert locked
    with held("a", timeout=0) as locked:
        assert locked


def test_shared_holders_meet_and_keep_exclusive_ones_out() -> None:
    with holder("a", "shared"):
        with held("a", shared=True, timeout=0) as locked:
            assert locked
        with held("a", timeout=0.01) as locked:
            assert not locked
    with holder("a"), held("a", shared=True, timeout=0) as locked:
        assert not locked


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


def test_lock_files_are_private_and_stay(own_state: Path) -> None:
    for name in ("a", "a", "../b\0c\n"):
        with held(name):
            pass
    files = list((own_state / "cache" / "locks").iterdir())
    assert len(files) == 2 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700


def test_the_lock_of_another_store_is_another_lock(tmp_path: Path) -> None:
    with holder("a"), held("a", timeout=0, root=tmp_path) as locked:
        assert locked
    assert len(list((tmp_path / "locks").iterdir())) == 1


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_without_flock_the_body_runs_without_a_lock(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held("a", timeout=600) as locked:
        assert not locked


def test_a_cache_that_cannot_be_written_gives_no_lock(own_state: Path) -> None:
    (own_state / "cache").mkdir()
    (own_state / "cache" / "locks").write_bytes(b"a file in the way")
    with held("a", timeout=600) as locked:
        assert not locked


def test_a_link_in_place_of_a_lock_file_is_not_followed(own_state: Path, tmp_path: Path) -> None:
    with held("a"):
        pass
    (path,) = (own_state / "cache" / "locks").iterdir()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with held("a", timeout=0) as locked:
        assert not locked
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_in_place_of_the_folder_of_locks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache/locks").symlink_to(tmp_path / "outside")
    with pytest.raises(MalformedFile), held("x", root=tmp_path / "cache"):
        pass
    assert not [*(tmp_path / "outside").iterdir()]


def test_an_error_of_the_body_passes_and_frees_the_lock() -> None:
    with pytest.raises(BlockingIOError), held("a"):
        raise BlockingIOError(errno.EAGAIN, "of the body")
    with held("a", timeout=0) as locked:
        assert locked


def test_sigterm_like_exits_free_the_lock() -> None:
    with pytest.raises(SystemExit), held("a"):
        raise SystemExit(128 + signal.SIGTERM)
    with held("a", timeout=0) as locked:
        assert locked
