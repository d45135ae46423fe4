"""A private folder of compiled machine code.

The name of a file is the digest of everything that changes its bytes. The file begins with the
digest of the rest of it, so a damaged file is compiled again. The folder must belong to this user
and be closed to others; otherwise nothing is kept.

Of several processes or threads that want the same code, one compiles it and the others wait for
it. A process that was killed holds nobody up.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "OSCAR_KERNELS_CACHE"
"""Environment variable that names the folder; `oscar-kernels` in the user's cache by default."""
PATIENCE = 120.0
"""Seconds to wait for another process that compiles the same code; then both do."""
_PAUSE = 0.02


def folder() -> Path:
    """Where machine code is kept."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
        / "oscar-kernels"
    )


def kept(key: Sequence[str], make: Callable[[], bytes]) -> bytes:
    """The bytes kept under `key`, or else those of `make`, which are kept from now on.

    Args:
        key: everything that changes the bytes.
    """
    place = _private(folder())
    if place is None:
        return make()
    path = place / f"{hashlib.sha256(repr(tuple(key)).encode()).hexdigest()}.cubin"
    code = _read(path)
    if code is None:
        with _alone(path.with_suffix(".lock")):
            code = _read(path)  # another process may have made it meanwhile
            if code is None:
                code = make()
                _write(path, code)
    return code


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is gone afterwards.

    Where the file system has no locks, or after `PATIENCE`, the body runs without one: two
    processes then compile the same code, and both are right.
    """
    descriptor = _locked(path)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _locked(path: Path) -> int | None:
    """A descriptor of the file `path` that holds its lock; `None` if it cannot be had."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            time.sleep(_PAUSE)
            continue
        except OSError:
            os.close(descriptor)
            return None
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its last holder has removed this file; the next one has another
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _private(place: Path) -> Path | None:
    """The folder, made if missing; `None` if others could write to it, or it cannot be made."""
    try:
        for folder in (*reversed(place.parents), place):  # also the parents for this user alone
            folder.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
    except OSError as error:
        logger.warning("compiled kernels are not kept: %s", error)
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        logger.warning(
            "compiled kernels are not kept: %s must be a folder that only this user can open", place
        )
        return None
    return place


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(name).replace(path)
