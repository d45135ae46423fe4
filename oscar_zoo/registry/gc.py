"""What in the store nothing needs any more, and taking it away.

Nothing that can be used is touched: complete entries stay, and so does what a process may be
working on. Entries are added while `durable.STORE` is held shared; this holds it exclusively. Where
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
from oscar_zoo.artifact.files import read_file
from oscar_zoo.errors import MalformedFile, PathNotFound
from oscar_zoo.registry.hubs.base import is_commit
from oscar_zoo.registry.store import COMPLETE, RECORD_NAME, RECORD_SCHEMA, Record, Store, inside

HUB_METADATA_SECONDS = 30 * 24 * 3600
_HEX = re.compile(r"[0-9a-f]{64}")
_PATIENCE = 10.0


class FileInode(NamedTuple):
    key: tuple[int, int]
    links: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileInode:
        return cls((status.st_dev, status.st_ino), status.st_nlink, status.st_size)


@dataclass(frozen=True)
class Garbage:
    """A file or folder that nothing needs, with the files in it, or itself; `kind` is `leftover`,
    `incomplete entry`, `empty folder`, `blob` or `hub metadata`."""

    path: Path
    kind: str
    key: tuple[int, int]
    files: tuple[FileInode, ...]


@dataclass(frozen=True)
class GcReport:
    """What was removed, or would be. `freed` are bytes of disk that this gives back, none of a file
    that has a name elsewhere; without `exclusive`, blobs younger than an hour stayed."""

    removed: tuple[Garbage, ...]
    freed: int
    exclusive: bool


def gc(store: Store, *, dry_run: bool = False, patience: float = _PATIENCE) -> GcReport:
    """Remove what no entry needs: blobs, leftovers of killed processes, incomplete entries, old
    listings of hubs. Processes that add entries just now are waited for `patience` seconds."""
    store.check_owner()
    if not store.root.exists():
        return GcReport((), 0, True)
    with (
        durable.storage_errors(f"cannot clean {store.root}", cache=True),
        durable.held(durable.STORE, timeout=patience, root=store.root) as alone,
    ):
        now = time.time()
        found = [*_leftovers(store), *_incomplete(store, now - durable.STALE_SECONDS)]
        found += _empty_folders(store, {item.path for item in found})
        found += _blobs(store, found, None if alone else now - durable.STALE_SECONDS)
        found += _hub_metadata(store, now - HUB_METADATA_SECONDS)
        removed = tuple(item for item in found if dry_run or _remove(item))
    files = {file.key: file for item in removed for file in item.files}
    names = Counter(file.key for item in removed for file in item.files)
    freed = sum(file.size for key, file in files.items() if names[key] == file.links)
    return GcReport(removed, freed, alone)


def is_rotten(entry: Path) -> bool:
    """Whether a complete entry lost its record; that of another version is not rotten."""
    if not (entry / COMPLETE).exists() or Record.read(entry) is not None:
        return False
    try:
        schema = strict_json.loads(read_file(entry / RECORD_NAME), what=RECORD_NAME)["schema"]
    except (MalformedFile, PathNotFound, LookupError, TypeError):
        return True
    return not isinstance(schema, str) or schema == RECORD_SCHEMA


def _leftovers(store: Store) -> Iterator[Garbage]:
    hubs = _folders(store.root / "hubs")
    commits = [commit for hub in hubs for commit in _folders(hub)]
    files = [commit / "files" for commit in commits]
    for folder in (store.root, store.blobs, store.artifacts, *hubs, *commits, *files):
        for path in inside(folder):
            with contextlib.suppress(FileNotFoundError):
                if durable.is_leftover(path.name, path.lstat()):
                    yield from _item(path, "leftover")


def _incomplete(store: Store, before: float) -> Iterator[Garbage]:
    """Entries without their mark, and those with a rotten record."""
    for entry in store.entry_folders():
        if not (entry / COMPLETE).exists() or is_rotten(entry):
            yield from _item(entry, "incomplete entry", before)


def _empty_folders(store: Store, gone: set[Path]) -> Iterator[Garbage]:
    for folder in _folders(store.artifacts):
        if _HEX.fullmatch(folder.name) and gone.issuperset(inside(folder)):
            yield from (replace(item, files=()) for item in _item(folder, "empty folder"))


def _blobs(store: Store, doomed: Iterable[Garbage], before: float | None) -> Iterator[Garbage]:
    """Blobs that no entry names, and that no file outside the doomed folders links."""
    used = {file.sha256 for record in store.installed() for file in record.files}
    names = Counter(file.key for item in doomed for file in item.files)
    for path in inside(store.blobs):
        if _HEX.fullmatch(path.name) and path.name not in used:
            for item in _item(path, "blob", before):
                if item.files and item.files[0].links == 1 + names[item.key]:
                    yield item


def _hub_metadata(store: Store, before: float) -> Iterator[Garbage]:
    """What hubs said of commits that nobody asked for in a month."""
    for hub in _folders(store.root / "hubs"):
        for folder in _folders(hub):
            if is_commit(folder.name):
                yield from _item(folder, "hub metadata", before)


def _folders(folder: Path) -> list[Path]:
    return [path for path in inside(folder) if path.is_dir() and not path.is_symlink()]


def _item(path: Path, kind: str, before: float | None = None) -> Iterator[Garbage]:
    """`path` with the files in it; nothing when it is gone, and with `before` when it is another
    user's, or changed since that moment."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if before is not None and (status.st_uid != os.getuid() or status.st_mtime >= before):
            return
        inner = path.rglob("*") if stat.S_ISDIR(status.st_mode) else [path]
        found = [file.lstat() for file in inner]
        files = tuple(FileInode.of(one) for one in found if not stat.S_ISDIR(one.st_mode))
        yield Garbage(path, kind, FileInode.of(status).key, files)


def _remove(item: Garbage) -> bool:
    """Take `item` away; false when it went meanwhile, or is in use by now."""
    try:
        status = item.path.lstat()
        linked = item.kind == "blob" and status.st_nlink > 1
        if FileInode.of(status).key != item.key or linked:
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
        same = FileInode.of(os.fstat(descriptor)).key == item.key
        if item.kind == "empty folder" or not same:
            return
        for name in os.listdir(descriptor):  # noqa: PTH208  (a descriptor, which no rename can swap)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    shutil.rmtree(name, dir_fd=descriptor)
                else:
                    os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
