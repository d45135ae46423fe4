"""A private folder of compiled machine code.

The name of a file is the digest of everything that changes its bytes. The file begins with the
digest of the rest of it, so a damaged file is compiled again. The folder must belong to this user
and be closed to others; otherwise nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "OSCAR_KERNELS_CACHE"
"""Environment variable that names the folder; `oscar-kernels` in the user's cache by default."""


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
        make: called if there is no undamaged file.
    """
    place = _private(folder())
    if place is None:
        return make()
    path = place / f"{hashlib.sha256(repr(tuple(key)).encode()).hexdigest()}.cubin"
    code = _read(path)
    if code is None:
        code = make()
        _write(path, code)
    return code


def _private(place: Path) -> Path | None:
    """The folder, made if missing; `None` if others could write to it, or it cannot be made."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
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
