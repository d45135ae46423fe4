"""Files and folders that appear whole or not at all.

Everything new is written under a `.tmp.<uuid>` name in the same file system, forced to disk, and
renamed to its place; the parent folder is forced to disk after that. A crash leaves only `.tmp.*`
names, which `sweep` removes an hour later. Nothing here depends on file locks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from oscar_zoo.errors import OscarZooError, StorageError

TEMP_PREFIX = ".tmp."
STALE_SECONDS = 3600
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def temp_path(folder: Path) -> Path:
    """A fresh name in `folder` for something not finished; nothing is created."""
    return folder / f"{TEMP_PREFIX}{uuid.uuid4().hex}"


def write_new(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Create `path` with `data` and force it to disk; the name must be free."""
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write `data` to `path` in one step.

    A reader sees either the old content or the new one, never a part.
    """
    fresh = temp_path(path.parent)
    try:
        write_new(fresh, data, mode=mode)
        os.replace(fresh, path)  # noqa: PTH105
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)


def check_writable(folder: Path) -> None:
    """Raise `OSError` where `folder` takes no new file; nothing is left in it.

    A file is created and removed, because rights alone do not tell what a file system refuses.
    """
    probe = temp_path(folder)
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    finally:
        probe.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Force the entries of `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path, *, mode: int = 0o755) -> None:
    """Create `folder` and its missing parents, each forced to disk in its own parent."""
    if folder.is_dir():
        return
    make_folders(folder.parent, mode=mode)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, mode)  # noqa: PTH102  (Path.mkdir hides which call failed)
    sync_folder(folder.parent)


@contextlib.contextmanager
def staged_folder(parent: Path, *, mode: int = 0o755) -> Iterator[Path]:
    """A new `.tmp.<uuid>` folder in `parent`.

    It is removed at the end unless it was renamed to its place.
    """
    folder = temp_path(parent)
    os.mkdir(folder, mode)  # noqa: PTH102
    try:
        yield folder
    finally:
        remove_tree(folder)


def move_into_place(staged: Path, target: Path) -> bool:
    """Rename the finished folder `staged` to `target`, never over content.

    Returns:
        False when `target` exists and is not an empty folder; `staged` is still there then.
    """
    sync_folder(staged)
    try:
        os.rename(staged, target)  # noqa: PTH104
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    sync_folder(target.parent)
    return True


def write_files(folder: Path, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
    """Write `files` (plain names) into the folder, in name order, each forced to disk."""
    for name in sorted(files):
        write_new(folder / name, files[name], mode=mode)


def remove_tree(folder: Path) -> None:
    """Remove `folder` and its content.

    A folder that is gone is ignored, and one that cannot be removed is left to `sweep`.
    """
    shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path, *, older_than: float = STALE_SECONDS) -> int:
    """Remove our own `.tmp.*` leftovers in `folder` that are older than `older_than` seconds.

    Returns:
        How many were removed.
    """
    removed = 0
    if not folder.is_dir():
        return 0
    for entry in os.scandir(folder):
        if not entry.name.startswith(TEMP_PREFIX):
            continue
        with contextlib.suppress(FileNotFoundError):
            info = entry.stat(follow_symlinks=False)
            if info.st_uid != os.getuid() or time.time() - info.st_mtime < older_than:
                continue
            if entry.is_dir(follow_symlinks=False):
                remove_tree(folder / entry.name)
            else:
                os.unlink(folder / entry.name)  # noqa: PTH108
            removed += 1
    return removed


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn operating system errors into one `StorageError`; our own errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OscarZooError):
            raise
        hints = {
            errno.ENOSPC: "free some space, then run the same command again",
            errno.EDQUOT: (
                "your disk quota is used up; free some space, then run the same command again"
            ),
            errno.EROFS: "the file system is read-only; choose another folder",
            errno.EACCES: "check who owns the folder and its permissions",
            errno.EPERM: "check who owns the folder and its permissions",
            errno.ENOTDIR: "check the path: a part of it is a file",
            errno.EEXIST: "check the path: a part of it is a file or a broken link",
            errno.ENOENT: "check the path: a part of it is a broken link",
            errno.ENAMETOOLONG: "choose a shorter path",
        }
        hint = hints.get(error.errno or 0, "nothing was half-written; run the same command again")
        raise StorageError(f"{what}: {error.strerror or error}.", hint=hint) from error
