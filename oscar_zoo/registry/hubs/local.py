"""A hub in a folder: `<Model>/<tag>/files`, with or without `oscar.json`; the layout of the public
rotation hub.

Publishing stages the files in the same file system and renames the whole folder to its place, so a
version is absent or complete, and two publishers cannot mix, whatever locks the file system has.
The root files are replaced after that, the index last and by compare and swap, so a kill
in between leaves a version that is only not in the index yet, and no writer overwrites the entry of
another. A lock, where there are locks, saves work. Links and unsafe names are never followed.

A writer claims the turn after the index that it read: it links its own index to the name
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Self

from oscar_zoo import errors
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.files import MAX_PAYLOAD_BYTES, read_file, sha256_hex
from oscar_zoo.artifact.names import ArtifactId, check_part, check_utf8
from oscar_zoo.registry.hubs.base import (
    INDEX_NAME,
    MAX_ROOT_BYTES,
    TIMESTAMP_NAME,
    Change,
    Commit,
    HubFile,
    Progress,
)

_LOCK_NAME = ".lock"
_LOCK_SECONDS = 60
_LONGEST_CHAIN = 10_000
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
CLAIM_PREFIX = ".after."
KEPT_SECONDS = 24 * 3600
"""How long a claim stays after its index was written, for helpers that were asleep."""


class LocalHub:
    """A hub whose artifacts lie in the folder `root`, which the first commit creates. Whether
    reading a missing one is an error or an empty hub, `must_exist` says."""

    def __init__(self, root: Path, *, must_exist: bool = True) -> None:
        self.root = root.absolute()
        check_utf8(self.root, "the path of a hub, which records and locks name,")
        self._must_exist = must_exist
        self._view: tuple[bytes | None] | None = None

    @property
    def name(self) -> str:
        return f"file:{self.root}"

    @property
    def title(self) -> str:
        return f"folder {self.root}"

    @property
    def revision(self) -> str:
        """sha256 of the index, of nothing where there is none; read once, then the same until
        `refresh`."""
        return _token(self._pinned_index())

    def at(self, revision: str) -> Self:
        if revision != self.revision:
            raise errors.RevisionNotFound.for_hub(self.title, revision)
        return self

    def refresh(self) -> None:
        self._view = None

    def artifacts(self) -> tuple[ArtifactId, ...]:
        make = (
            "check the path of the hub, and OSCAR_ZOO_HUB if it names the hub; to make a new one"
            f" there: oscar-zoo publish FOLDER --hub {quote(self.name)} --create"
        )
        with durable.storage_errors(f"cannot list {self.name}"):
            if not self.root.is_dir():
                if self._must_exist or self.root.exists():
                    raise errors.PathNotFound(f"no such folder for a hub: {self.root}", hint=make)
                return ()
            found = self._listed()
            if not found and self._must_exist and _holds_other_files(self.root):
                text = f"there is no hub at {self.name}: the folder holds other files."
                raise errors.PathNotFound(text, hint=make)
            return found

    def _listed(self) -> tuple[ArtifactId, ...]:
        models = {model: _folders(self.root / model) for model in _folders(self.root)}
        found = (ArtifactId(model, tag) for model, tags in models.items() for tag in tags)
        return tuple(sorted(one for one in found if _entries(self.root / str(one))))

    def files(self, artifact: ArtifactId) -> tuple[HubFile, ...]:
        """The files of `artifact`, sorted, but hidden ones; links are refused."""
        folder, found = self._folder(artifact), []
        for name in _plain_files(folder):
            data = read_file(folder / name, max_bytes=MAX_PAYLOAD_BYTES)
            found.append(HubFile(name, len(data), sha256_hex(data)))
        return tuple(found)

    def fetch(
        self, artifact: ArtifactId, path: str, *, limit: int, progress: Progress | None = None
    ) -> bytes:
        folder = self._folder(artifact)
        data = read_file(folder / check_part(path, "file name"), max_bytes=limit)
        if progress is not None:
            progress(path, len(data), len(data))
        return data

    def root_file(self, path: str) -> bytes | None:
        """A file in the root, or `None`; the index always as it was when `revision` was read."""
        if path == INDEX_NAME:
            return self._pinned_index()
        try:
            return read_file(self.root / check_part(path, "file name"), max_bytes=MAX_ROOT_BYTES)
        except errors.PathNotFound:
            return None

    def commit(self, change: Change) -> Commit:
        if change.propose:
            text = f"{self.title} takes no proposals."
            raise errors.UsageError(text, hint="publish without --create-pr")
        for name in (*change.files, *change.root):
            check_part(name, "file name")
        if change.artifact is not None:
            durable.refuse_links(self.root, change.artifact.model, change.artifact.tag)
        with durable.storage_errors(f"cannot publish to {self.name}"):
            durable.make_folders(self.root)
            durable.sweep(self.root)
            with self._turn():
                self._write(change)
        self.refresh()
        return Commit(self.revision)

    def tidy(self) -> None:
        """Remove what killed writers left; a failure is none: it is not what was asked for."""
        with contextlib.suppress(OSError):
            durable.sweep(self.root)

    def tag(self, name: str, revision: str | None, message: str) -> None:
        """Nothing: a folder has no tags, and its versions do not move."""

    def _write(self, change: Change) -> None:
        if change.parent != _token(_current(self.root)):
            raise errors.StaleRevision.for_hub(self.title)
        if change.artifact is not None:
            self._place(change.artifact, change.files)
        for name in sorted(change.root.keys() - {INDEX_NAME, TIMESTAMP_NAME}):
            durable.replace_file(self.root / name, change.root[name])
        index = change.root.get(INDEX_NAME)
        if index is not None and not _write_index(self.root, change.parent, index):
            raise errors.StaleRevision.for_hub(self.title, placed=change.artifact is not None)
        if (stamp := change.root.get(TIMESTAMP_NAME)) is not None:  # by who has the turn alone
            durable.replace_file(self.root / TIMESTAMP_NAME, stamp)

    def _place(self, artifact: ArtifactId, files: Mapping[str, bytes]) -> None:
        if any(other.key == artifact.key for other in self._listed()):
            raise errors.StaleRevision.for_hub(self.title)
        model = self.root / artifact.model
        with durable.staged_folder(self.root) as staged:
            durable.write_files(staged, files)
            durable.make_folders(model)  # once there is space for what goes into it
            if not durable.move_into_place(staged, model / artifact.tag):
                raise errors.StaleRevision.for_hub(self.title)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Be the only writer; where the file system has no locks, one of several."""
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.root / _LOCK_NAME, flags, 0o666)
        with durable.held_descriptor(descriptor, timeout=_LOCK_SECONDS) as state:
            if state == "late":
                raise errors.StorageError(
                    f"another process has been writing to {self.title} for {_LOCK_SECONDS} s.",
                    hint="nothing was written; run it again when the other one is done",
                )
            yield

    def _pinned_index(self) -> bytes | None:
        if self._view is None:
            self._view = (_current(self.root),)
        return self._view[0]

    def _folder(self, artifact: ArtifactId) -> Path:
        parts = (check_part(artifact.model), check_part(artifact.tag))
        folder = durable.refuse_links(self.root, *parts)
        if not folder.exists():
            raise errors.ArtifactNotFound(
                f"{artifact} is not on {self.name}.",
                hint=f"see what is there: oscar-zoo list --hub {self.name}",
            )
        return folder


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _folders(folder: Path) -> list[str]:
    found = [entry.name for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]
    return [name for name in found if _is_safe(name)]


def _holds_other_files(folder: Path) -> bool:
    """Whether a folder without artifacts is something else than a hub that is still empty, or into
    which somebody writes the first version just now."""
    names = {entry.name for entry in _entries(folder)}
    shown = any(not name.startswith(".") for name in names)
    return shown and not names & {INDEX_NAME, _LOCK_NAME}


def _plain_files(folder: Path) -> list[str]:
    names = []
    for entry in _entries(folder):
        if entry.name.startswith("."):
            continue
        durable.refuse_links(folder, entry.name)
        if not _is_safe(entry.name):
            raise errors.MalformedFile(
                "file.name",
                f"{folder} has a file with the name {entry.name[:120]!r}.",
                hint="rename or remove it",
            )
        if entry.is_file(follow_symlinks=False):
            names.append(entry.name)
    return sorted(names)


def _is_safe(name: str) -> bool:
    try:
        check_part(name)
    except errors.InvalidName:
        return False
    return True


def _token(index: bytes | None) -> str:
    return sha256_hex(index or b"")


def _current(root: Path) -> bytes | None:
    """`index.json`, or what was claimed after it; `None` where there is none, until the next writer
    brings it back."""
    index = _read(root / INDEX_NAME)
    return None if index is None else _last(root, index)


def _write_index(root: Path, parent: str, index: bytes) -> bool:
    """Write `index` as the one after `parent`; false where another writer has that turn, whose
    index is in place then."""
    before = _current(root)
    won = _token(before) == parent and _win(root, before, index)
    there = _read(root / INDEX_NAME)
    last = _last(root, there)
    if last is not None and there != last:
        durable.replace_file(root / INDEX_NAME, last)
    if won:
        _forget(root, last)
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


def _last(root: Path, index: bytes | None) -> bytes | None:
    for _ in range(_LONGEST_CHAIN):
        following = _read(_claim(root, index))
        if following is None:
            break
        index = following
    return index


def _forget(root: Path, index: bytes | None) -> None:
    """Remove claims of long ago, other than that after `index`."""
    for path in root.glob(f"{CLAIM_PREFIX}*"):
        with contextlib.suppress(OSError):
            old = time.time() - path.lstat().st_mtime > KEPT_SECONDS
            if old and path != _claim(root, index):
                path.unlink()


def _claim(root: Path, index: bytes | None) -> Path:
    return root / f"{CLAIM_PREFIX}{_token(index)}"


def _read(path: Path) -> bytes | None:
    try:
        return read_file(path, max_bytes=MAX_ROOT_BYTES)
    except errors.PathNotFound:
        return None
