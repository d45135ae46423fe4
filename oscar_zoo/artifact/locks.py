"""Locks that save work, such as a second download of the same bytes.

Correctness never depends on these locks: flock lies or is missing on some network file systems, so
the holder of a lock must do the right thing without it too. Lock files are never deleted, because
two processes would then hold locks on two files of one name. A killed process holds nothing.

The name in use is `store`: shared while entries are added, exclusive while `gc` looks; see `STORE`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from oscar_zoo import paths
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.digest import sha256_hex

STORE = "store"
"""The lock of the whole store."""
_LONGEST_SLEEP = 0.05
State = Literal["held", "late", "none"]


@contextlib.contextmanager
def held(
    name: str, *, timeout: float = 600.0, shared: bool = False, root: Path | None = None
) -> Iterator[bool]:
    """Hold the lock `name` while the body runs, and say whether it is held; not re-entrant.

    Waiting ends at once on Ctrl-C. Where the file system has no locks, or the folder cannot be
    written, the body runs without one; after `timeout` too.

    Args:
        timeout: seconds to wait for others.
        root: the folder of the store; default the cache folder of this user.
    """
    path = (root or paths.cache_dir()) / "locks" / f"{sha256_hex(name.encode())[:16]}.lock"
    with held_file(path, timeout=timeout, shared=shared) as locked:
        yield locked


@contextlib.contextmanager
def held_file(path: Path, *, timeout: float, shared: bool = False) -> Iterator[bool]:
    """Hold the lock file `path`, which is created when possible."""
    descriptor = _open(path)
    if descriptor is None:
        yield False
        return
    with held_descriptor(descriptor, timeout=timeout, shared=shared) as state:
        yield state == "held"


@contextlib.contextmanager
def held_descriptor(descriptor: int, *, timeout: float, shared: bool = False) -> Iterator[State]:
    """Hold an open lock file, and close it at the end.

    Returns:
        `held`; `late` when others held it until `timeout`; `none` where the file system has no
        locks.
    """
    try:
        state = _lock(
            descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + timeout
        )
        try:
            yield state
        finally:
            if state == "held":  # closing is not enough while a forked child has the same open file
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int | None:
    """The lock file, created where it is missing, or `None` when that cannot be; raises
    `MalformedFile` where its folder is a link."""
    durable.refuse_links(path.parent.parent, path.parent.name)
    try:
        durable.check_private(path.parent.parent, path.parent)
        durable.make_folders(path.parent, mode=0o700)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _lock(descriptor: int, kind: int, deadline: float) -> State:
    sleep = 0.001
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                return "late"
            time.sleep(min(sleep, left))
            sleep = min(2 * sleep, _LONGEST_SLEEP)
        except OSError:
            return "none"
        else:
            return "held"
