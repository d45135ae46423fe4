"""The index of a hub in a folder, replaced by compare and swap without the help of locks.

A writer first claims the turn after the index that it read: it links its own index to the name
`.after.<sha256 of the index read>`. Only one link of a name can exist, on any file system that has
links, so of two writers one is refused and reads again. The claim holds the whole next index, so
whoever finds a claim after `index.json` knows what comes next and can finish for a writer that was
killed. What counts is therefore the end of the chain of claims from `index.json` on: one that is
put back by a slow helper is led forward again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.files import read_file, sha256_hex
from oscar_zoo.errors import PathNotFound
from oscar_zoo.registry.hubs.base import INDEX_NAME, MAX_ROOT_BYTES

CLAIM_PREFIX = ".after."
KEPT_SECONDS = 24 * 3600
"""How long a claim stays after its index was written, for helpers that were asleep."""

_LONGEST_CHAIN = 10_000
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def token(index: bytes | None) -> str:
    """The name of an index: sha256 of its bytes, of nothing where there is none."""
    return sha256_hex(index or b"")


def current(root: Path) -> bytes | None:
    """The index of the hub in `root`: `index.json`, or what was claimed after it.

    `None` where there is no `index.json`; the next writer brings it back where it was deleted."""
    index = _read(root / INDEX_NAME)
    return None if index is None else _last(root, index)


def write(root: Path, parent: str, index: bytes) -> bool:
    """Write `index` as the one after `parent`.

    Returns:
        False where another writer has that turn; its index is in place then.
    """
    before = current(root)
    won = token(before) == parent and _win(root, before, index)
    _settle(root)
    if won:
        _forget(root)
    return won


def _win(root: Path, before: bytes | None, index: bytes) -> bool:
    if index == before:
        return True
    fresh = durable.temp_path(root)
    try:
        durable.write_new(fresh, index)
        try:
            os.link(fresh, _claim(root, before), follow_symlinks=False)
        except FileExistsError:
            return _read(_claim(root, before)) == index  # as of a run that was killed
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.replace(fresh, root / INDEX_NAME)  # noqa: PTH105  (the lock is all there is)
        durable.sync_folder(root)
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _settle(root: Path) -> None:
    """Bring `index.json` to the end of the chain."""
    index = _read(root / INDEX_NAME)
    last = _last(root, index)
    if last is not None and index != last:
        durable.replace_file(root / INDEX_NAME, last)


def _last(root: Path, index: bytes | None) -> bytes | None:
    """The end of the chain of claims from `index` on."""
    for _ in range(_LONGEST_CHAIN):
        following = _read(_claim(root, index))
        if following is None:
            break
        index = following
    return index


def _forget(root: Path) -> None:
    """Remove claims of long ago, other than those that count."""
    index = _read(root / INDEX_NAME)
    for path in root.glob(f"{CLAIM_PREFIX}*"):
        with contextlib.suppress(OSError):
            old = time.time() - path.lstat().st_mtime > KEPT_SECONDS
            if old and path != _claim(root, index):
                path.unlink()


def _claim(root: Path, index: bytes | None) -> Path:
    return root / f"{CLAIM_PREFIX}{token(index)}"


def _read(path: Path) -> bytes | None:
    try:
        return read_file(path, max_bytes=MAX_ROOT_BYTES)
    except PathNotFound:
        return None
