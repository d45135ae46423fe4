"""What in the store nothing needs any more, and taking it away.

Nothing that can be used is touched: complete entries stay, and so does what a process may be
working on. Entries are added while `locks.STORE` is held shared; this holds it exclusively. Where
that is not possible (others are busy, or there are no locks), blobs younger than an hour stay too,
and every removal is one that a `put` at the same moment survives: it keeps a copy where a blob
vanished, and an entry that was replaced is known by its inode and stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.durable import STORE, held
from oscar_zoo.artifact.files import read_file
from oscar_zoo.errors import MalformedFile, PathNotFound
from oscar_zoo.registry import store as records
from oscar_zoo.registry.store import COMPLETE, Record, Store, inside

HUB_METADATA_SECONDS = 30 * 24 * 3600
_HEX = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PATIENCE = 10.0


class FileInode(NamedTuple):
    """One file by its identity on the disk: device and inode, how many names it has, its bytes."""

    key: tuple[int, int]
    links: int
    size: int


@dataclass(frozen=True)
class Garbage:
    """A file or folder that nothing needs.

    Attributes:
        kind: `leftover`, `incomplete entry`, `empty folder`, `blob` or `hub metadata`.
        files: the files in it, or itself.
    """

    path: Path
    kind: str
    key: tuple[int, int]
    files: tuple[FileInode, ...]


@dataclass(frozen=True)
class GcReport:
    """What was removed, or would be.

    Attributes:
        freed: bytes of disk that this gives back; a file that has a name elsewhere gives none.
        exclusive: whether others were kept out; without that, blobs younger than an hour stay.
    """

    removed: tuple[Garbage, ...]
    freed: int
    exclusive: bool


def gc(store: Store, *, dry_run: bool = False, patience: float = _PATIENCE) -> GcReport:
    """Remove what no entry needs: blobs, leftovers of killed processes, incomplete entries, old
    listings of hubs.

    Args:
        patience: seconds to wait for processes that add entries just now.
    """
    store.check_owner()
    if not store.root.exists():
        return GcReport((), 0, True)
    with (
        durable.storage_errors(f"cannot clean {store.root}", cache=True),
        held(STORE, timeout=patience, root=store.root) as alone,
    ):
        found = _garbage(store, alone=alone)
        removed = found if dry_run else tuple(item for item in found if _remove(item))
    return GcReport(removed, _freed(removed), alone)


def is_rotten(entry: Path) -> bool:
    """Whether the complete entry in the folder `entry` lost its record; that of another version is
    not rotten."""
    if not (entry / COMPLETE).exists() or Record.read(entry) is not None:
        return False
    try:
        schema = strict_json.loads(
            read_file(entry / records.RECORD_NAME), what=records.RECORD_NAME
        )["schema"]
    except (MalformedFile, PathNotFound, LookupError, TypeError):
        return True
    return not isinstance(schema, str) or schema == records.RECORD_SCHEMA


def _garbage(store: Store, *, alone: bool) -> tuple[Garbage, ...]:
    now = time.time()
    used = {file.sha256 for record in store.installed() for file in record.files}
    found = [*_leftovers(store, now), *_incomplete(store, now)]
    found += _empty_folders(store, {item.path for item in found})
    found += _blobs(store, used, found, None if alone else now - durable.STALE_SECONDS)
    return (*found, *_hub_metadata(store.root / "hubs", now))


def _leftovers(store: Store, now: float) -> Iterator[Garbage]:
    """`.tmp.*` of this user in every folder we write to."""
    hubs = _folders(store.root / "hubs")
    commits = [commit for hub in hubs for commit in _folders(hub)]
    for folder in (
        store.root,
        store.blobs,
        store.artifacts,
        *hubs,
        *commits,
        *(c / "files" for c in commits),
    ):
        for path in inside(folder):
            with contextlib.suppress(FileNotFoundError):
                if durable.is_leftover(path.name, path.lstat()):
                    yield from _item(path, "leftover")


def _incomplete(store: Store, now: float) -> Iterator[Garbage]:
    """Entries without their mark, and those with a rotten record; what another version wrote
    stays."""
    for entry in store.entry_folders():
        if (not (entry / COMPLETE).exists() or is_rotten(entry)) and _is_older(
            entry, now - durable.STALE_SECONDS
        ):
            yield from _item(entry, "incomplete entry")


def _empty_folders(store: Store, gone: set[Path]) -> Iterator[Garbage]:
    for folder in _folders(store.artifacts):
        if _HEX.fullmatch(folder.name) and gone.issuperset(inside(folder)):
            yield from (replace(item, files=()) for item in _item(folder, "empty folder"))


def _blobs(
    store: Store, used: set[str], doomed: Iterable[Garbage], before: float | None
) -> Iterator[Garbage]:
    """Blobs that no entry names, and that no file outside the doomed folders links."""
    names = Counter(file.key for item in doomed for file in item.files)
    for path in inside(store.blobs):
        if (
            _HEX.fullmatch(path.name)
            and path.name not in used
            and (before is None or _is_older(path, before))
        ):
            yield from (
                i for i in _item(path, "blob") if i.files and i.files[0].links == 1 + names[i.key]
            )


def _hub_metadata(hubs: Path, now: float) -> Iterator[Garbage]:
    """What hubs said of commits that nobody asked for in a month."""
    for hub in _folders(hubs):
        for folder in _folders(hub):
            if _COMMIT.fullmatch(folder.name) and _is_older(folder, now - HUB_METADATA_SECONDS):
                yield from _item(folder, "hub metadata")


def _folders(folder: Path) -> list[Path]:
    return [path for path in inside(folder) if path.is_dir() and not path.is_symlink()]


def _is_older(path: Path, moment: float) -> bool:
    """Whether `path` is of this user and did not change since `moment`; false when it is gone."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and status.st_mtime < moment


def _item(path: Path, kind: str) -> Iterator[Garbage]:
    """`path` with the files in it; nothing when it is gone."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        inner = path.rglob("*") if stat.S_ISDIR(status.st_mode) else [path]
        files = tuple(
            _inode(s) for s in (file.lstat() for file in inner) if not stat.S_ISDIR(s.st_mode)
        )
        yield Garbage(path, kind, _inode(status).key, files)


def _inode(status: os.stat_result) -> FileInode:
    return FileInode((status.st_dev, status.st_ino), status.st_nlink, status.st_size)


def _remove(item: Garbage) -> bool:
    """Take `item` away; false when it went meanwhile, or is in use by now."""
    try:
        status = item.path.lstat()
        if _inode(status).key != item.key or (item.kind == "blob" and status.st_nlink > 1):
            return False
        if stat.S_ISDIR(status.st_mode):
            _empty(item)
            item.path.rmdir()
        else:
            item.path.unlink()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _empty(item: Garbage) -> None:
    """Remove what is in the folder that was looked at, and in no other that has its name by now."""
    descriptor = os.open(item.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if item.kind == "empty folder" or _inode(os.fstat(descriptor)).key != item.key:
            return
        for name in os.listdir(descriptor):  # noqa: PTH208  (a descriptor, which no rename can swap)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    shutil.rmtree(name, dir_fd=descriptor)
                else:
                    os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _freed(removed: Iterable[Garbage]) -> int:
    """Bytes of the files that lost their last name."""
    files = [file for item in removed for file in item.files]
    names = Counter(file.key for file in files)
    return sum({file.key: file.size for file in files if names[file.key] == file.links}.values())
