"""Small files of a hub at a commit, kept on this machine: its listing, its index, its manifests.

```
<cache>/hubs/<16 hex of the hub>/<commit>/listing.json
<cache>/hubs/<16 hex of the hub>/<commit>/files/<quoted path>
<cache>/hubs/<16 hex of the hub>/answered   empty; its time: when the hub last told its commit
```

A commit never changes, so nothing here grows old; only full commits are kept. Each file starts with
a line that says the sha256, commit and name of the rest. What is unreadable, torn or writable by
others counts as absent, a folder of another user is an error, and a disk that takes nothing only
costs requests. Many processes that need the same file at once wait for the first of them, but not
for long, and nothing is wrong when two fetch it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from oscar_zoo import paths
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.files import read_file, sha256_hex
from oscar_zoo.errors import ForeignFolder, OscarZooError

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
    """What is kept of one hub.

    Args:
        root: the cache folder; default that of this user.
    """

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


def newest_files(path: str, root: Path | None = None) -> list[bytes]:
    """The file `path` as it was last seen on every hub of which one is kept; asks no hub.

    Args:
        root: the cache folder; default that of this user.
    """
    folder, name = (root or paths.cache_dir()) / "hubs", f"files/{quote(path, safe='')}"
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
