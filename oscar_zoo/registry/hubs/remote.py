"""A hub behind HTTP, with a cache of what a commit says for ever.

The first question resolves a name to a commit; every later answer comes from that commit. The
listing at the commit is the only word on what exists: files are asked for by it, bounded by it, and
compared with it as far as it goes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import quote

from oscar_zoo import errors, paths
from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.files import mistaken_content, read_file, sha256_hex
from oscar_zoo.artifact.names import ArtifactId, check_part
from oscar_zoo.artifact.strict_json import Json
from oscar_zoo.registry.hubs.base import (
    MAX_ROOT_BYTES,
    Change,
    Commit,
    HubFile,
    Progress,
    is_commit,
)

MANIFEST_NAME = "oscar.json"
"""`artifact.manifest.FILE_NAME`, without what importing it costs."""
Listing = Mapping[str, HubFile]
"""Every file of a repository by its full path, which is also its `HubFile.path`."""


class RemoteHub(ABC):
    """A repository of a hub over the network, at a branch, tag or commit, or at the main branch,
    which alone is published to; see `base.Hub` for what the methods promise. Threads may share it.

    A class of its own for each kind of hub asks for what is abstract here, anew every time."""

    def __init__(self, scheme: str, kind: str, repo: str, revision: str | None) -> None:
        self.repo = repo
        self.plain_name, self.title = f"{scheme}:{repo}", f"{kind} {repo}"
        self._asked = revision
        self._lock = threading.RLock()
        self._pinned: str | None = None
        self._files: Listing | None = None

    @property
    @abstractmethod
    def key(self) -> str:
        """What tells the repository from all others: its name and address."""

    @abstractmethod
    def resolve(self, revision: str | None) -> str:
        """The commit of the branch, tag or commit `revision`, default of the main branch."""

    @abstractmethod
    def listing(self, revision: str) -> Listing:
        """Every file at `revision`, which `resolve` returned."""

    @abstractmethod
    def read(
        self,
        revision: str,
        file: HubFile,
        *,
        limit: int,
        progress: Callable[[int], None] | None = None,
    ) -> bytes:
        """What the hub sends for `file`, compared with nothing; `limit` bytes at most are taken."""

    @abstractmethod
    def create(self) -> None:
        """Create the repository; one that exists stays as it is."""

    @abstractmethod
    def write(self, change: Change) -> Commit:
        """Send a change that the listing of its parent allows."""

    @abstractmethod
    def tag(self, name: str, revision: str | None, message: str) -> None: ...

    @property
    def name(self) -> str:
        return self.plain_name + (f"@{self._asked}" if self._asked else "")

    @property
    def revision(self) -> str:
        with self._lock:
            if self._pinned is None:
                self._pinned = self.resolve(self._asked)
                if self._asked is None:
                    self.cache.note_answer()
            return self._pinned

    def at(self, revision: str) -> Self:
        view = copy.copy(self)
        view._asked, view._lock = revision, threading.RLock()
        view.refresh()
        return view

    def refresh(self) -> None:
        with self._lock:
            self._pinned = self._files = None

    def artifacts(self) -> tuple[ArtifactId, ...]:
        owners = {owner for owner, _ in map(_place, self._listing())}
        return tuple(sorted(owner for owner in owners if owner is not None))

    def files(self, artifact: ArtifactId) -> tuple[HubFile, ...]:
        """The files of `artifact` by plain name, sorted; hidden and odd names are left out."""
        found = [
            HubFile(name, file.size, file.sha256, file.git_oid)
            for path, file in self._listing().items()
            for owner, name in (_place(path),)
            if owner == artifact
        ]
        if not found:
            raise errors.ArtifactNotFound(
                f"{artifact} is not on {self.title}.",
                hint=f"see what is there: oscar-zoo list --hub {self.name}",
            )
        return tuple(sorted(found))

    def fetch(
        self, artifact: ArtifactId, path: str, *, limit: int, progress: Progress | None = None
    ) -> bytes:
        full = f"{artifact}/{check_part(path, 'file name')}"
        file = self._listing().get(full)
        if file is None:
            self.files(artifact)
            raise errors.NotFoundError(
                f"{artifact} on {self.title} has no file {path}.", hint="its owner removed it"
            )
        size = file.size
        told = None if progress is None else lambda done: progress(path, done, size)
        if path != MANIFEST_NAME:
            return self._read(file, limit, told)
        data = self._kept(file, limit)
        if progress is not None:
            progress(path, len(data), size)
        return data

    def root_file(self, path: str) -> bytes | None:
        file = self._listing().get(check_part(path, "file name"))
        return self._kept(file, MAX_ROOT_BYTES) if file is not None else None

    def commit(self, change: Change) -> Commit:
        if self._asked is not None:
            raise errors.UsageError(
                f"{self.name} is a view of one revision.", hint=f"publish to {self.plain_name}"
            )
        if change.artifact is not None and change.parent is not None:
            key = change.artifact.key
            view = self if change.parent == self._pinned else self.at(change.parent)
            if any(there.key == key for there in view.artifacts()):
                raise errors.StaleRevision(
                    f"{change.artifact} is already on {self.title}.", hint="versions never change"
                )
        return self.write(change)

    @property
    def cache(self) -> MetadataCache:
        return MetadataCache(self.key)

    def _listing(self) -> Listing:
        with self._lock:
            if self._files is None:
                data = self.cache.once(self.revision, "listing.json", self._listing_bytes)
                what = f"the listing of {self.title}"
                rows = strict_json.loads(data, what=what, max_bytes=MAX_FILE_BYTES)
                self._files = {row[0]: HubFile(*row) for row in rows}
            return self._files

    def _listing_bytes(self) -> bytes:
        files = sorted(self.listing(self.revision).values())
        return strict_json.canonical_bytes([[f.path, f.size, f.sha256, f.git_oid] for f in files])

    def _kept(self, file: HubFile, limit: int) -> bytes:
        """A small file, from the cache or through it; compared with the listing either way."""
        read = partial(self._read, file, limit)
        data = self.cache.once(self.revision, kept_name(file.path), read)
        return read() if difference(file, data) is not None or len(data) > limit else data

    def _read(
        self, file: HubFile, limit: int, progress: Callable[[int], None] | None = None
    ) -> bytes:
        """One file. A copy that differs from the listing is fetched once more, then refused."""
        if file.size > limit:
            raise errors.MalformedFile(
                "file.size",
                f"{file.path} on {self.title} has {file.size:,} bytes, at most {limit:,} are read.",
            )
        for last in (False, True):
            try:
                data = self.read(self.revision, file, limit=file.size, progress=progress)
            except errors.MalformedFile:
                if last:
                    raise
                continue
            wrong = difference(file, data)
            if wrong is None:
                return data
        raise errors.DigestMismatchError(
            f"{file.path} on {self.title} {wrong}.",
            hint="the hub or something on the way changed it; try again later",
        )


def difference(file: HubFile, data: bytes) -> str | None:
    """How `data` differs from what is listed, in words that follow the file's name, or `None`."""
    if len(data) != file.size:
        mistaken = mistaken_content(data)
        seen = "empty" if not data else f"as {mistaken[1] if mistaken else f'{len(data):,} bytes'}"
        return f"arrived {seen}, not the {file.size:,} bytes listed"
    if file.sha256 is None and file.git_oid is not None:
        got, want = git_oid(data), file.git_oid
        # Some listings tell the oid of what git holds in place of a file in LFS: a pointer to it.
        pointer = (
            "version https://git-lfs.github.com/spec/v1\n"
            f"oid sha256:{sha256_hex(data)}\nsize {len(data)}\n"
        )
        same = want in (got, git_oid(pointer.encode()))
        return None if same else f"arrived with git oid {got}, expected {want}"
    if file.sha256 in (None, got := sha256_hex(data)):
        return None
    return f"arrived with sha256 {got}, expected {file.sha256}"


def listed_file(title: str, path: Json, size: Json, **digests: Json) -> HubFile:
    if type(path) is not str or type(size) is not int or size < 0:
        raise errors.HubUnreachable.for_hub(title, "its listing has a file without path or size")
    return HubFile(path, size, digests.get("sha256"), digests.get("git_oid"))


def by_path(title: str, files: Iterable[HubFile]) -> dict[str, HubFile]:
    found: dict[str, HubFile] = {}
    for file in files:
        if found.setdefault(file.path, file) is not file:
            raise errors.HubUnreachable.for_hub(title, "its listing names a file twice")
    return found


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _place(path: str) -> tuple[ArtifactId | None, str]:
    """Whose file `path` is, if any artifact's, and its plain name."""
    parts = path.split("/")
    try:
        for part in parts:
            check_part(part)
    except errors.InvalidName:
        return None, path
    return (ArtifactId(parts[0], parts[1]), parts[2]) if len(parts) == 3 else (None, path)


MAX_FILE_BYTES = 16 << 20
"""Larger files are not kept."""
MAX_COMMITS = 8
"""Commits kept of one hub, the newest."""
LOCK_SECONDS = 10.0
_ANSWERED = "answered"


class MetadataCache:
    """What is kept of one hub: of each commit its listing and small files, each behind a line with
    its digest and name."""

    def __init__(self, key: str) -> None:
        self._root = paths.cache_dir()
        self._folder = self._root / "hubs" / sha256_hex(key.encode())[:16]

    def copies(self, path: str) -> tuple[bytes, ...]:
        return tuple(_copies(self._folder, self._root, path))

    def note_answer(self) -> None:
        with contextlib.suppress(OSError):
            durable.check_private(*_above(self._folder / _ANSWERED, self._root))
            durable.make_folders(self._folder, mode=0o700)
            (self._folder / _ANSWERED).touch(mode=0o600)

    def seconds_since_answer(self) -> float | None:
        """How long ago that was; `None` if never."""
        try:
            return max(0.0, time.time() - (self._folder / _ANSWERED).stat().st_mtime)
        except OSError:
            return None

    def once(self, revision: str, name: str, fetch: Callable[[], bytes]) -> bytes:
        place = self._folder / revision / name
        if not is_commit(revision) or not _is_ours(place, self._root):
            return fetch()
        data = _read(place, self._root, revision, name)
        if data is not None:
            return data
        lock = self._folder / "locks" / f"{sha256_hex(f'{revision} {name}'.encode())[0]}.lock"
        with durable.held_file(lock, timeout=LOCK_SECONDS):
            data = _read(place, self._root, revision, name)
            if data is None:
                data = fetch()
                if len(data) <= MAX_FILE_BYTES:
                    self._keep(place, _header(revision, name, data) + data, revision)
        return data

    def _keep(self, place: Path, content: bytes, revision: str) -> None:
        with contextlib.suppress(OSError):
            durable.make_folders(place.parent, mode=0o700)
            durable.replace_file(place, content, mode=0o600)
            durable.sweep(self._folder / revision)
            commits = (entry for entry in self._folder.iterdir() if is_commit(entry.name))
            for old in _newest_first(commits)[MAX_COMMITS:]:
                if old.name != revision:
                    durable.remove_tree(old)


def newest_files(path: str) -> list[bytes]:
    """The file `path` as it was last seen on every hub of which one is kept; asks no hub."""
    root, found = paths.cache_dir(), list[bytes]()
    with contextlib.suppress(OSError):
        for hub in sorted((root / "hubs").iterdir()):
            found += itertools.islice(_copies(hub, root, path), 1)
    return found


def _copies(folder: Path, root: Path, path: str) -> Iterator[bytes]:
    """The file `path` at every commit that is kept of a hub, the newest first."""
    name = kept_name(path)
    for place in _newest_first(folder.glob(f"*/{name}")):
        data = _read(place, root, place.parents[1].name, name)
        if data is not None:
            yield data


def kept_name(path: str) -> str:
    return f"files/{quote(path, safe='')}"


def _newest_first(places: Iterable[Path]) -> list[Path]:
    return sorted(places, key=lambda place: place.stat().st_mtime, reverse=True)


def _header(revision: str, name: str, data: bytes) -> bytes:
    return f"1 {sha256_hex(data)} {revision} {name}\n".encode()


def _read(place: Path, root: Path, revision: str, name: str) -> bytes | None:
    """The content of a kept file, where it is whole, and nobody else could have written it."""
    if not _is_ours(place, root):
        return None
    try:
        stored = read_file(place, max_bytes=MAX_FILE_BYTES + 1024)
    except errors.OscarZooError:
        return None
    head, _, data = stored.partition(b"\n")
    return data if head + b"\n" == _header(revision, name, data) else None


def _above(place: Path, root: Path) -> list[Path]:
    return [folder for folder in reversed(place.parents) if folder.is_relative_to(root)]


def _is_ours(place: Path, root: Path) -> bool:
    """Whether nobody else could have written `place`; raises where `root` is another user's."""
    try:
        durable.check_private(*_above(place, root))
    except errors.ForeignFolder:
        raise
    except OSError:
        return False
    return True
