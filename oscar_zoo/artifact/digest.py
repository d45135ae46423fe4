"""Digests: sha256 of bytes and files, and the digest of an artifact over its file list.

The artifact digest is the sha256 of the canonical JSON of `[{"path", "sha256", "size"}, ...]`
sorted by path. It names the payload bytes; `oscar.json` is not part of it.

Two artifacts of one fit may differ in nothing but the bits and clips of their layers and sides,
which change every stored byte of a cache. So an artifact whose recipe has widths has them in a
payload file too, `widths.json`, and the digest covers them with the same rule. An artifact with
codes of 2 bits everywhere has no such file: its digest is that of its rotations and statistics, as
it was before widths existed. Locks, indexes, the store and hubs need no rule of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from oscar_zoo.artifact.strict_json import canonical_bytes


@dataclass(frozen=True, order=True)
class FileDigest:
    """One payload file: its relative POSIX path, sha256 as 64 hex digits, and size in bytes."""

    path: str
    sha256: str
    size: int


def sha256_hex(data: bytes) -> str:
    """sha256 of `data` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: str, data: bytes) -> FileDigest:
    """The entry of one payload file whose content is `data`."""
    return FileDigest(path, sha256_hex(data), len(data))


def artifact_digest(files: Iterable[FileDigest]) -> str:
    """`sha256:<hex>` of the artifact made of `files`, independent of their order."""
    rows = [{"path": f.path, "sha256": f.sha256, "size": f.size} for f in sorted(files)]
    return "sha256:" + sha256_hex(canonical_bytes(rows))
