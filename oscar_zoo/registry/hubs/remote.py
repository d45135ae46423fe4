"""A hub behind HTTP, made of a source, which speaks its language, and a cache of what a commit says
for ever.

The first question resolves a name to a commit; every later answer comes from that commit. The
listing at the commit is the only word on what exists: files are asked for by it, bounded by it, and
compared with it as far as it goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import quote

from oscar_zoo import paths
from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.files import mistaken_content, read_file, sha256_hex
from oscar_zoo.artifact.names import ArtifactId, check_part
from oscar_zoo.errors import (
    ArtifactNotFound,
    DigestMismatchError,
    ForeignFolder,
    InvalidName,
    MalformedFile,
    NotFoundError,
    OscarZooError,
    StaleRevision,
    UsageError,
)
from oscar_zoo.registry.hubs.base import MAX_ROOT_BYTES, Change, Commit, HubFile, Progress

MANIFEST_NAME = "oscar.json"
"""`artifact.manifest.FILE_NAME`, without what importing it costs."""
Listing = Mapping[str, HubFile]
"""Every file of a repository by its full path, which is also its `HubFile.path`."""


class HubSource(Protocol):
    """One repository on one hub, asked anew every time. Errors are those of `base.Hub`."""

    @property
    def name(self) -> str:
        """The hub as people write it, without a revision: `hf:org/name`."""

    @property
    def title(self) -> str:
        """The hub in a sentence: `Hugging Face org/name`."""

    @property
    def key(self) -> str:
        """What tells it from all others: its name and address."""

    def resolve(self, revision: str | None) -> str:
        """What answers refer to: the commit of the branch, tag or commit `revision`, default of the
        main branch."""

    def listing(self, revision: str) -> Listing:
        """Every file at `revision`, which `resolve` returned."""

    def read(
        self,
        revision: str,
        file: HubFile,
        *,
        limit: int,
        progress: Callable[[int], None] | None = None,
    ) -> bytes:
        """What the hub sends for `file` of `listing(revision)`: at most `limit` bytes, not compared
        with anything.

        Args:
            file: which file; its path is the full path in the repository.
            limit: more bytes are refused as `file.size`.
            progress: told the bytes that arrived so far.
        """

    def create(self, *, private: bool) -> None:
        """Create the repository; one that exists stays as it is."""

    def commit(self, change: Change) -> Commit:
        """See `base.Hub.commit`."""

    def tag(self, name: str, revision: str | None, message: str) -> None:
        """See `base.Hub.tag`."""


class RemoteHub:
    """A hub over the network; see `base.Hub` for what the methods promise. Threads may share it.

    Args:
        revision: branch, tag or commit to look at; default the main branch. Such a view is not
            published to.
        cache: what is kept of the hub; default in the cache folder of this user.
    """

    def __init__(
        self, source: HubSource, *, revision: str | None = None, cache: MetadataCache | None = None
    ) -> None:
        self._source = source
        self._asked = revision
        self._cache = cache
        self._lock = threading.RLock()
        self._pinned: str | None = None
        self._listed: Listing | None = None

    @property
    def name(self) -> str:
        """The hub as people write it, with the revision that was asked for: `hf:org/name@v1`."""
        return self._source.name + (f"@{self._asked}" if self._asked else "")

    @property
    def title(self) -> str:
        return self._source.title

    @property
    def revision(self) -> str:
        """The commit all answers refer to; the first call asks the hub."""
        with self._lock:
            if self._pinned is None:
                self._pinned = self._source.resolve(self._asked)
                if self._asked is None:
                    self._metadata().note_answer()
            return self._pinned

    def at(self, revision: str) -> Self:
        return type(self)(self._source, revision=revision, cache=self._cache)

    def refresh(self) -> None:
        with self._lock:
            self._pinned = self._listed = None

    def artifacts(self) -> tuple[ArtifactId, ...]:
        """Every `<Model>/<tag>` that has a file, sorted; other files of the repository are left
        out."""
        return tuple(
            sorted(
                {artifact for artifact, _ in map(_place, self._listing()) if artifact is not None}
            )
        )

    def files(self, artifact: ArtifactId) -> tuple[HubFile, ...]:
        """The files of `artifact` by plain name, sorted; hidden and odd names are left out."""
        found = [
            HubFile(name, file.size, file.sha256, file.git_oid)
            for path, file in self._listing().items()
            for owner, name in (_place(path),)
            if owner == artifact
        ]
        if not found:
            raise ArtifactNotFound(
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
            raise NotFoundError(
                f"{artifact} on {self.title} has no file {path}.", hint="its owner removed it"
            )
        count = (lambda done: progress(path, done, file.size)) if progress is not None else None
        if path == MANIFEST_NAME:
            data = self._kept(file, limit)
            if count is not None:
                count(len(data))
            return data
        return self._read(file, limit, count)

    def root_file(self, path: str) -> bytes | None:
        file = self._listing().get(check_part(path, "file name"))
        return self._kept(file, MAX_ROOT_BYTES) if file is not None else None

    def kept_root_files(self, path: str) -> tuple[bytes, ...]:
        """A root file as it is kept of every commit that was looked at on this machine; asks
        nobody."""
        return self._metadata().copies(check_part(path, "file name"))

    def seconds_since_answer(self) -> float | None:
        """How long ago this hub told anybody on this machine where it stands; `None` if never. Asks
        nobody."""
        return self._metadata().seconds_since_answer()

    def create(self, *, private: bool = False) -> None:
        self._source.create(private=private)

    def commit(self, change: Change) -> Commit:
        if self._asked is not None:
            raise UsageError(
                f"{self.name} is a view of one revision.", hint=f"publish to {self._source.name}"
            )
        if change.artifact is not None and change.parent is not None:
            key = change.artifact.key
            view = self if change.parent == self._pinned else self.at(change.parent)
            if any(there.key == key for there in view.artifacts()):
                raise StaleRevision(
                    f"{change.artifact} is already on {self.title}.", hint="versions never change"
                )
        return self._source.commit(change)

    def tag(self, name: str, revision: str | None, message: str) -> None:
        self._source.tag(name, revision, message)

    def _listing(self) -> Listing:
        with self._lock:
            if self._listed is None:
                revision = self.revision
                data = self._metadata().listing(
                    revision, lambda: _to_bytes(self._source.listing(revision))
                )
                self._listed = _from_bytes(data, f"the listing of {self.title}")
            return self._listed

    def _metadata(self) -> MetadataCache:
        if self._cache is None:
            self._cache = MetadataCache(self._source.key)
        return self._cache

    def _kept(self, file: HubFile, limit: int) -> bytes:
        """A small file, from the cache or through it; compared with the listing either way."""
        data = self._metadata().file(
            self.revision, file.path, partial(self._read, file, limit, None, whole=True)
        )
        if difference(file, data, whole=True) is not None or len(data) > limit:
            return self._read(file, limit, None, whole=True)
        return data

    def _read(
        self,
        file: HubFile,
        limit: int,
        progress: Callable[[int], None] | None,
        *,
        whole: bool = False,
    ) -> bytes:
        """One file. A copy that differs from the listing is fetched once more from the same hub,
        then refused."""
        if file.size > limit:
            raise MalformedFile(
                "file.size",
                f"{file.path} on {self.title} has {file.size:,} bytes, at most {limit:,} are read.",
            )
        for last in (False, True):
            try:
                data = self._source.read(self.revision, file, limit=file.size, progress=progress)
            except MalformedFile:
                if last:
                    raise
                continue
            wrong = difference(file, data, whole=whole)
            if wrong is None:
                return data
        raise DigestMismatchError(
            f"{file.path} on {self.title} {wrong}.",
            hint="the hub or something on the way changed it; try again later",
        )


def difference(file: HubFile, data: bytes, *, whole: bool = True) -> str | None:
    """How `data` differs from what is listed, in words that follow the file's name, or `None`.

    Args:
        whole: whether to compare the sha256 too, where one is listed.
    """
    if len(data) != file.size:
        mistaken = mistaken_content(data)
        seen = "empty" if not data else f"as {mistaken[1] if mistaken else f'{len(data):,} bytes'}"
        return f"arrived {seen}, not the {file.size:,} bytes listed"
    if file.sha256 is None and file.git_oid is not None:
        got, want = git_oid(data), file.git_oid
        if want in (got, git_oid(_lfs_pointer(data))):
            return None
        return f"arrived with git oid {got}, expected {want}"
    if whole and file.sha256 is not None:
        got, want = sha256_hex(data), file.sha256
        return f"arrived with sha256 {got}, expected {want}" if got != want else None
    return None


def git_oid(data: bytes) -> str:
    """The sha1 by which git knows a file with the content `data`, as 40 hex digits."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _lfs_pointer(data: bytes) -> bytes:
    """What git holds in place of a file in LFS (its pointer format, version 1); some listings tell
    the oid of that."""
    lines = (
        "version https://git-lfs.github.com/spec/v1",
        f"oid sha256:{sha256_hex(data)}",
        f"size {len(data)}",
        "",
    )
    return "\n".join(lines).encode()


def _place(path: str) -> tuple[ArtifactId | None, str]:
    """Whose file `path` is, and its plain name; no artifact's, where the path is not
    `<Model>/<tag>/<file>`."""
    parts = path.split("/")
    try:
        for part in parts:
            check_part(part)
    except InvalidName:
        return None, path
    return (ArtifactId(parts[0], parts[1]), parts[2]) if len(parts) == 3 else (None, path)


def _to_bytes(listing: Listing) -> bytes:
    return strict_json.canonical_bytes(
        [[f.path, f.size, f.sha256, f.git_oid] for f in sorted(listing.values())]
    )


def _from_bytes(data: bytes, what: str) -> Listing:
    rows = strict_json.loads(data, what=what, max_bytes=MAX_FILE_BYTES)
    return {path: HubFile(path, size, sha256, oid) for path, size, sha256, oid in rows}


MAX_FILE_BYTES = 16 << 20
"""Larger files are not kept."""
MAX_COMMITS = 8
"""Commits kept of one hub, the newest."""
LOCK_SECONDS = 10.0
_LISTING = "listing.json"
_ANSWERED = "answered"
_FORMAT = "1"
_COMMIT = re.compile(r"[0-9a-f]{40}")


class MetadataCache:
    """What is kept of one hub."""

    def __init__(self, key: str, root: Path | None = None) -> None:
        self._root = root or paths.cache_dir()
        self._folder = self._root / "hubs" / sha256_hex(key.encode())[:16]

    def listing(self, revision: str, fetch: Callable[[], bytes]) -> bytes:
        """The listing at `revision`; `fetch` is called when it is not here."""
        return self._once(revision, _LISTING, fetch)

    def file(self, revision: str, path: str, fetch: Callable[[], bytes]) -> bytes:
        """The file `path` of the repository at `revision`; `fetch` is called when it is not
        here."""
        return self._once(revision, f"files/{quote(path, safe='')}", fetch)

    def copies(self, path: str) -> tuple[bytes, ...]:
        """The file `path` at every commit it is kept of."""
        name = f"files/{quote(path, safe='')}"
        found = (
            _read(entry / name, f"{entry.name} {name}")
            for entry in self._commits()
            if _is_ours(entry / name, self._root)
        )
        return tuple(data for data in found if data is not None)

    def note_answer(self) -> None:
        """Remember that the hub told just now which commit it is at."""
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

    def _commits(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [entry for entry in self._folder.iterdir() if _COMMIT.fullmatch(entry.name)]
        return []

    def _once(self, revision: str, name: str, fetch: Callable[[], bytes]) -> bytes:
        place = self._folder / revision / name
        if _COMMIT.fullmatch(revision) is None or not _is_ours(place, self._root):
            return fetch()
        title = f"{revision} {name}"
        data = _read(place, title)
        if data is not None:
            return data
        lock = self._folder / "locks" / f"{sha256_hex(title.encode())[0]}.lock"
        with durable.held_file(lock, timeout=LOCK_SECONDS):
            data = _read(place, title)
            if data is None:
                data = fetch()
                if len(data) <= MAX_FILE_BYTES:
                    self._keep(place, title, data, revision)
        return data

    def _keep(self, place: Path, title: str, data: bytes, revision: str) -> None:
        with contextlib.suppress(OSError):
            durable.make_folders(place.parent, mode=0o700)
            durable.replace_file(place, _header(title, data) + data, mode=0o600)
            self._prune(revision)

    def _prune(self, current: str) -> None:
        durable.sweep(self._folder / current)
        newest = sorted(self._commits(), key=lambda entry: entry.stat().st_mtime, reverse=True)
        for old in newest[MAX_COMMITS:]:
            if old.name != current:
                durable.remove_tree(old)


def _header(title: str, data: bytes) -> bytes:
    return f"{_FORMAT} {sha256_hex(data)} {title}\n".encode()


def _read(place: Path, title: str) -> bytes | None:
    try:
        stored = read_file(place, max_bytes=MAX_FILE_BYTES + 1024)
    except OscarZooError:
        return None
    head, _, data = stored.partition(b"\n")
    return data if head + b"\n" == _header(title, data) else None


def _above(place: Path, root: Path) -> list[Path]:
    """The folders that lead to `place`, from `root` on."""
    return [folder for folder in reversed(place.parents) if folder.is_relative_to(root)]


def _is_ours(place: Path, root: Path) -> bool:
    """Whether nobody else could have written `place`; raises where `root` is another user's."""
    try:
        durable.check_private(*_above(place, root))
    except ForeignFolder:
        raise
    except OSError:
        return False
    return True


def newest_files(path: str) -> list[bytes]:
    """The file `path` as it was last seen on every hub of which one is kept; asks no hub."""
    folder, name = paths.cache_dir() / "hubs", f"files/{quote(path, safe='')}"
    found = []
    with contextlib.suppress(OSError):
        for hub in sorted(folder.iterdir()):
            kept = sorted(
                hub.glob(f"*/{name}"), key=lambda place: place.stat().st_mtime, reverse=True
            )
            commits = (
                _read(place, f"{place.parents[1].name} {name}")
                for place in kept
                if _is_ours(place, folder.parent)
            )
            found += [data for data in commits if data is not None][:1]
    return found
