"""Float32 tensors in the safetensors layout: a strict reader and a canonical writer.

8 bytes header length, a JSON header, the data. The reader takes no duplicate key, no unknown field, no other dtype, no
gap and no overlap; the writer sorts names, so the same tensors give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact import strict_json
from oscar_zoo.errors import MalformedFile

MAX_HEADER = 1 << 16
MAX_AXIS = 1 << 24


def write(tensors: Mapping[str, NDArray[np.float32]]) -> bytes:
    """The canonical file of `tensors`, names in sorted order."""
    header: dict[str, Any] = {}
    body = bytearray()
    for name in sorted(tensors):
        content = np.ascontiguousarray(tensors[name], dtype="<f4").tobytes()
        offsets = [len(body), len(body) + len(content)]
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": offsets}
        body += content
    text = strict_json.canonical_bytes(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(body)


def read(data: bytes, *, what: str) -> dict[str, NDArray[np.float32]]:
    """Parse an untrusted file.

    Args:
        data: the whole file.
        what: its name for messages.

    Returns:
        Read-only arrays by name.

    Raises:
        MalformedFile: reasons `safetensors.*`, and `json.*` for the header.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(MAX_HEADER, len(data) - 8):
        _bad("header", f"{what} has no safetensors header.")
    header = strict_json.loads(data[8 : 8 + size], what=f"the header of {what}", max_bytes=MAX_HEADER)
    if type(header) is not dict or not header:
        _bad("header", f"{what} lists no tensors.")
    body = memoryview(data)[8 + size :]
    tensors: dict[str, NDArray[np.float32]] = {}
    position = 0
    for name, (shape, start, end) in sorted(
        ((name, _entry(name, entry, what)) for name, entry in header.items()), key=lambda item: item[1][1]
    ):
        if start != position or end - start != 4 * math.prod(shape) or end > len(body):
            _bad("gap", f"{what}: {name[:60]!r} does not lie where it must.")
        tensors[name] = np.array(np.frombuffer(body[start:end], dtype="<f4").reshape(shape), dtype=np.float32)
        tensors[name].setflags(write=False)
        position = end
    if position != len(body):
        _bad("gap", f"{what}: {len(body) - position} bytes belong to no tensor.")
    return tensors


def _entry(name: str, entry: Any, what: str) -> tuple[tuple[int, ...], int, int]:
    """Shape, start and end of one header entry."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _bad("entry", f"{what}: the entry {name[:60]!r} has missing or unknown fields.")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if entry["dtype"] != "F32":
        _bad("dtype", f"{what}: {name[:60]!r} is not float32.")
    if type(shape) is not list or len(shape) > 4 or not all(type(n) is int and 0 < n < MAX_AXIS for n in shape):
        _bad("shape", f"{what}: {name[:60]!r} has a shape out of range.")
    if type(offsets) is not list or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        _bad("entry", f"{what}: {name[:60]!r} has offsets out of range.")
    return tuple(shape), offsets[0], offsets[1]


def _bad(reason: str, message: str) -> NoReturn:
    raise MalformedFile(f"safetensors.{reason}", message)
