"""How workers wait for the process that compiles their kernels ahead.

That process, and its forks, hold a lock on a file, which is free as soon as all of them have ended,
whatever ended them. Workers inherit the name of the file as a variable. Correctness never depends
on the lock: a worker that does not wait compiles for itself. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "OSCAR_ZOO_COMPILING"
"""Environment variable with the path of the lock file."""
PATIENCE = 120.0
"""Seconds that a worker waits, and that compiling ahead may take."""
_PAUSE = 0.02


@contextlib.contextmanager
def held() -> Iterator[tuple[int, Path]]:
    """A new lock file that the block holds, and that every process which inherits the descriptor
    goes on to hold.
    """
    descriptor, name = tempfile.mkstemp(prefix="oscar-zoo-compiling-")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor, Path(name)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def wait() -> None:
    """Return when nobody compiles ahead for this server any more, or after `PATIENCE`."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    try:
        descriptor = os.open(name, os.O_RDONLY)
    except OSError:  # it has ended
        return
    try:
        if _free(descriptor, time.monotonic() + PATIENCE):
            Path(name).unlink(missing_ok=True)
        else:
            logger.warning("INT2 KV cache: kernels are compiled here, because others are too slow")
    finally:
        os.close(descriptor)


def _free(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        except OSError:
            return True
