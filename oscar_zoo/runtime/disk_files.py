"""Records in files of a private folder, which outlive a server. Needs no torch.

A file is a header and bytes as they lie in memory. The header has the tag of what wrote it, the
name of the file, and a checksum over all. A file that is cut short, damaged, from another place or
of another tag is as good as none: it is counted, and removed. The checksum finds accidents. It is
no signature: who may write into the folder decides what a server reads.

Each tag has a folder of its own. When all of them together are larger than they may be, the files
that were read or written longest ago are removed, whatever their tag, and never any others.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import threading
import zlib
from contextlib import suppress
from pathlib import Path

from oscar_zoo.artifact import durable

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8s20s72sQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"OZKVFILE"
_TAG, _NAME = re.compile(r"oz1-[0-9a-f]{16}"), re.compile(r"[0-9a-f]{64}\.(page|sinks)")
_LEFT = 0.9
"""Part of the limit that is left when files are removed, so that it happens seldom."""
_USUAL_SHARE = 0.5
"""Of what is free and of what the files have already, where nobody says a limit."""


def make_private(folder: Path) -> None:
    """Make the folder where it is missing. It must be ours, and closed to others."""
    with durable.storage_errors(f"cannot use {folder}"):
        durable.make_folders(folder, mode=0o700)
    durable.check_private(folder, open_to=0o077, elsewhere="name another folder: --disk-cache DIR")


class DiskFiles:
    """The files of one tag in `folder`, from any thread. `limit`: bytes of the files of all tags,
    half of what is free by default."""

    def __init__(self, folder: Path, tag: str, limit: int | None = None) -> None:
        if not _TAG.fullmatch(tag):
            raise ValueError(f"{tag!r} is no tag")
        for place in (folder, folder / tag):
            make_private(place)
        durable.tidy(folder / tag)
        self._root, self._folder, self._tag = folder, folder / tag, tag.encode()
        self.counts = dict.fromkeys(("written", "read", "broken", "removed", "failed"), 0)
        self._trimming = threading.Lock()
        self._used = sum(size for _, size, _ in self._all())
        free = shutil.disk_usage(folder).free
        self.limit = int(_USUAL_SHARE * (free + self._used)) if limit is None else limit
        self._trim()

    def has(self, name: str) -> bool:
        return os.path.exists(self._path(name))  # noqa: PTH110  (it never raises)

    def write(self, name: str, *parts: memoryview) -> bool:
        """Have a file with these bytes; whether it is there now. One that is there stays.

        Nothing is forced to the disk: the checksum finds what a crash of the machine leaves half
        written."""
        path, size = self._path(name), sum(part.nbytes for part in parts)
        # One damaged file may have others beside it, which nobody reads while it is missing.
        if not self.counts["broken"] or self.read(name, memoryview(bytearray(size))):
            with suppress(OSError):
                os.utime(path)
                return True
        head, fresh = self._header(name, size), durable.temp_path(self._folder)
        start = head + _CHECKSUM.pack(_checksum(head, *parts))
        try:
            with fresh.open("xb") as stream:
                stream.write(start)
                for part in parts:
                    stream.write(part)
            fresh.replace(path)
        except OSError as error:
            self._failed(f"cannot write {path}", error)
            return False
        finally:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
        self.counts["written"] += 1
        self._used += size
        self._trim()
        return True

    def read(self, name: str, target: memoryview) -> bool:
        """Fill `target`; whether the file is there and whole, else the target holds anything."""
        path, head = self._path(name), self._header(name, target.nbytes)
        try:
            with path.open("rb") as stream:
                start = stream.read(len(head) + _CHECKSUM.size)
                whole = stream.readinto(target) == target.nbytes and not stream.read(1)  # type: ignore[attr-defined]
            found = whole and start == head + _CHECKSUM.pack(_checksum(head, target))
            if found:
                os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._failed(f"cannot read {path}", error)
            return False
        if found:
            self.counts["read"] += 1
            return True
        self.counts["broken"] += 1
        logger.warning("INT2 KV cache: %s is damaged or not what it should be; removed", path)
        with suppress(OSError):
            path.unlink()
        return False

    def clear(self) -> None:
        """Remove the files of this tag."""
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a file")
        return self._folder / name

    def _header(self, name: str, size: int) -> bytes:
        return _HEADER.pack(_MAGIC, self._tag, name.encode(), size)

    def _all(self) -> list[tuple[int, int, Path]]:
        """When each file was used last, its bytes, and the file."""
        found = []
        for path in self._root.glob("oz1-*/*"):
            if _TAG.fullmatch(path.parent.name) and _NAME.fullmatch(path.name):
                with suppress(OSError):
                    status = path.lstat()
                    found.append((status.st_mtime_ns, status.st_size, path))
        return found

    def _trim(self) -> None:
        if self._used <= self.limit or not self._trimming.acquire(blocking=False):
            return
        try:
            files = sorted(self._all())
            used = sum(size for _, size, _ in files)
            for _, size, path in files:
                if used <= _LEFT * self.limit:
                    break
                with suppress(OSError):
                    path.unlink()
                    used -= size
                    self.counts["removed"] += 1
            self._used = used
        finally:
            self._trimming.release()

    def _failed(self, what: str, error: OSError) -> None:
        self.counts["failed"] += 1
        if self.counts["failed"] == 1:  # a full disk would say it for every page
            logger.warning("INT2 KV cache: %s: %s; later failures are only counted", what, error)


def _checksum(*parts: bytes | memoryview) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value
