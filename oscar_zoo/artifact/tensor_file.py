"""Tensors of one dtype in the safetensors layout: a strict reader and a canonical writer.

8 bytes header length, a JSON header, the data. The reader takes no duplicate key, no unknown field,
no other dtype, no gap and no overlap; the writer sorts names, so the same tensors give the same
bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import read_start, refuse_mistaken
from oscar_zoo.errors import MalformedFile

MAX_HEADER = 1 << 16
LONGEST_HEADER = 16 << 20
"""Most bytes of a header that any reader takes."""
MAX_AXIS = 1 << 24
METADATA = "__metadata__"
CHECKSUM = "oscar-zoo.sha256"
"""Key of the metadata whose value is the sha256, in hex, of the other values of the metadata in
sorted order of their keys, as UTF-8, and of all data in the order of the file."""

Dtype = Literal["F32", "F64"]
Array = NDArray[np.float32] | NDArray[np.float64]

_STORED: Mapping[Dtype, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8")}


def write(
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    *,
    checksum: bool = False,
) -> bytes:
    """The canonical file of float32 or float64 `tensors`, sorted by name."""
    kept = dict(metadata or {})
    header: dict[str, Any] = {}
    content: list[bytes] = []
    position = 0
    for name in sorted(tensors):
        dtype: Dtype = "F64" if tensors[name].dtype == np.float64 else "F32"
        content.append(np.ascontiguousarray(tensors[name], dtype=_STORED[dtype]).tobytes())
        end = position + len(content[-1])
        shape = list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    if checksum:
        kept[CHECKSUM] = _checksum(kept, content)
    if kept:
        header[METADATA] = kept
    text = strict_json.canonical_bytes(header)
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *content))


def read(data: bytes, *, what: str) -> dict[str, NDArray[np.float32]]:
    """Parse a whole untrusted file of float32 tensors without metadata; arrays are read-only."""
    header, body = _split(data, what, MAX_HEADER)
    tensors = _tensors(header, body, "F32", what)
    return {name: np.asarray(array, dtype=np.float32) for name, array in tensors.items()}


def read_with_metadata(
    data: bytes, *, what: str, max_header: int
) -> tuple[dict[str, NDArray[np.float64]], dict[str, str]]:
    """Parse a whole untrusted file of float64 tensors with metadata: read-only views of `data`, and
    the metadata. A `CHECKSUM` is checked where the file has one, and left out."""
    header, body = _split(data, what, max_header)
    metadata = header.pop(METADATA, {})
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        _bad("metadata", f"{what}: the metadata is not text.")
    tensors = _tensors(header, body, "F64", what)
    said = metadata.pop(CHECKSUM, None)
    if said is not None and said != _checksum(metadata, (body,)):
        _bad("checksum", f"{what} is damaged: its content has another sha256 than it says.")
    return {name: np.asarray(array, dtype=np.float64) for name, array in tensors.items()}, metadata


def check_start(path: Path) -> None:
    """Refuse what does not begin as such a file; no more than its beginning is read."""
    start = read_start(path, 256)
    refuse_mistaken(start, what=str(path))
    if not 2 <= int.from_bytes(start[:8], "little") <= LONGEST_HEADER:
        _no_header(str(path))


def _split(data: bytes, what: str, max_header: int) -> tuple[dict[str, Any], memoryview]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(max_header, len(data) - 8):
        _no_header(what)
    header = strict_json.loads(
        data[8 : 8 + size], what=f"the header of {what}", max_bytes=max_header
    )
    if type(header) is not dict or not header:
        _bad("header", f"{what} lists no tensors.")
    return header, memoryview(data)[8 + size :]


def _checksum(metadata: Mapping[str, str], content: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for key in sorted(metadata):
        digest.update(metadata[key].encode())
    for part in content:
        digest.update(part)
    return digest.hexdigest()


def _tensors(
    header: Mapping[str, Any], body: memoryview, dtype: Dtype, what: str
) -> dict[str, Array]:
    stored = _STORED[dtype]
    tensors: dict[str, Array] = {}
    position = 0
    entries = [(name, *_entry(name, entry, dtype, what)) for name, entry in header.items()]
    for name, shape, start, end in sorted(entries, key=lambda entry: entry[2]):
        size = stored.itemsize * math.prod(shape)
        if start != position or end - start != size or end > len(body):
            _bad("gap", f"{what}: {name[:60]!r} does not lie where it must.")
        tensors[name] = np.require(
            np.frombuffer(body[start:end], dtype=stored), requirements=["A"]
        ).reshape(shape)
        tensors[name].setflags(write=False)
        position = end
    if position != len(body):
        _bad("gap", f"{what}: {len(body) - position} bytes belong to no tensor.")
    return tensors


def _entry(name: str, entry: Any, dtype: Dtype, what: str) -> tuple[tuple[int, ...], int, int]:
    """Shape, start and end of one header entry."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _bad("entry", f"{what}: the entry {name[:60]!r} has missing or unknown fields.")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if entry["dtype"] != dtype:
        _bad("dtype", f"{what}: {name[:60]!r} is not {'float32' if dtype == 'F32' else 'float64'}.")
    small = type(shape) is list and len(shape) <= 4
    if not small or not all(type(n) is int and 0 < n < MAX_AXIS for n in shape):
        _bad("shape", f"{what}: {name[:60]!r} has a shape out of range.")
    two = type(offsets) is list and len(offsets) == 2
    if not two or not all(type(n) is int and n >= 0 for n in offsets):
        _bad("entry", f"{what}: {name[:60]!r} has offsets out of range.")
    return tuple(shape), offsets[0], offsets[1]


def _no_header(what: str) -> NoReturn:
    _bad("header", f"{what} has no safetensors header; it is another kind of file.")


def _bad(reason: str, message: str) -> NoReturn:
    raise MalformedFile(f"safetensors.{reason}", message)
