"""Reading files that others wrote, and their digests.

A file is opened once, without following links and without waiting, and is read once with a bound on
its size. The digest of an artifact is the sha256 of the canonical JSON of
`[{"path", "sha256", "size"}, ...]` sorted by path. It names the payload bytes; `oscar.json` is not
part of it, and the widths of a recipe are, because they are in the payload file `widths.json` too.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact.strict_json import canonical_bytes
from oscar_zoo.errors import MalformedFile, PathNotFound, StorageError

MAX_FILE_BYTES = 64 << 20
"""Largest file that is read by default, in bytes."""
MAX_PAYLOAD_BYTES = 208 << 20
"""Largest payload file read: matrices and partners for 40 layers of 40 heads of 128 channels, which
are checked in less than 300 MB. Files with one matrix per layer have 2 to 17 MB."""
MAX_ARTIFACT_BYTES = 2 * MAX_PAYLOAD_BYTES
"""Most bytes of one artifact that are read into memory."""


def read_file(path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file, read once; its last part must not be a symbolic link."""
    return _read(path, max_bytes, whole=True)


def read_start(path: Path, size: int) -> bytes:
    return _read(path, size, whole=False)


def _read(path: Path, most: int, *, whole: bool) -> bytes:
    descriptor, size = _open(path)
    with os.fdopen(descriptor, "rb") as stream:
        if whole and size > most:
            message = f"{path} has {size:,} bytes, at most {most:,} are read."
            raise MalformedFile("file.size", message)
        try:
            data = stream.read(size + 1 if whole else most)
        except OSError as error:
            raise StorageError.for_os(f"cannot read {path}", error) from None
    if whole and len(data) != size:
        raise MalformedFile("file.changed", f"{path} changed while it was read.", hint="try again")
    return data


def _open(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular file."""
    no_file = MalformedFile("file.kind", f"{path} is not a regular file.", hint="name a file")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise PathNotFound.for_path(path, "file") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            message = f"{path} is a symbolic link, which is not followed."
            hint = "put a copy of what it leads to in its place"
            raise MalformedFile("file.kind", message, hint=hint) from None
        if error.errno == errno.ENXIO:
            raise no_file from None
        raise StorageError.for_os(f"cannot read {path}", error) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise no_file
    return descriptor, status.st_size


def refuse_mistaken(data: bytes, *, what: str) -> None:
    if mistake := mistaken_content(data):
        raise MalformedFile(mistake[0], f"{what} is {mistake[1]}.", hint=mistake[2])


def mistaken_content(data: bytes) -> tuple[str, str, str] | None:
    """Code, words and a hint for what hubs and people often give in place of a file."""
    head = data[:256].lstrip().lower()
    if not data:
        return "file.empty", "empty", "fetch it again"
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "file.html", "a web page", "fetch it from the hub, not from its web view"
    if head.startswith(b"version https://git-lfs"):
        return "file.lfs", "a Git LFS pointer", "run `git lfs pull` in its repository"
    return None


@dataclass(frozen=True, order=True)
class FileDigest:
    """One payload file: its relative POSIX path, sha256 as 64 hex digits, and size in bytes."""

    path: str
    sha256: str
    size: int


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(path: str, data: bytes) -> FileDigest:
    return FileDigest(path, sha256_hex(data), len(data))


def artifact_digest(files: Iterable[FileDigest]) -> str:
    """`sha256:<hex>` of the artifact made of `files`, independent of their order."""
    rows = [{"path": f.path, "sha256": f.sha256, "size": f.size} for f in sorted(files)]
    return "sha256:" + sha256_hex(canonical_bytes(rows))
