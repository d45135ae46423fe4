"""RotationSet -> the one canonical rotation file.

The archive and the pickle are emitted by us, so the same arrays give the same bytes in every
process and on every machine: fixed root name, no time stamps, a serialization id derived from the
content. `torch.load(weights_only=True)` and our own reader both accept the result; the writer
proves the latter before it returns.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from oscar_zoo.artifact import archive
from oscar_zoo.artifact.formats import Array, LayerTransform, RotationSet
from oscar_zoo.artifact.reader import GROUPINGS, PARTNER, read_rotation
from oscar_zoo.errors import UsageError

ROOT = "archive"


def rotation_bytes(rotations: RotationSet) -> bytes:
    """The canonical file of float32 `rotations`, format_version 1, 2 or 3 as the set says."""
    pickle = _Pickle(share=rotations.objective == "hadamard")
    pickle.value(_top(rotations))
    content = [(archive.PICKLE, pickle.finish()), ("byteorder", b"little")]
    content += [(f"{archive.DATA}{key}", record) for key, record in enumerate(pickle.records)]
    identity = hashlib.sha256()
    for name, record in content:
        identity.update(f"{name}|{len(record)}|".encode() + record)
    digits = f"{int(identity.hexdigest(), 16) % 10**40:040d}".encode()
    content += [("version", b"3\n"), (".data/serialization_id", digits)]
    data = archive.write_archive(ROOT, content)
    read_rotation(data, what="the file to be written")
    return data


def _top(rotations: RotationSet) -> dict[str, Any]:
    words = {ours: theirs for theirs, ours in GROUPINGS.get(rotations.format_version, {}).items()}
    if rotations.grouping not in words:
        version, grouping = rotations.format_version, rotations.grouping
        raise UsageError(f"format_version {version} cannot hold the grouping {grouping}.")
    top: dict[str, Any] = {
        "format_version": rotations.format_version,
        "objective": rotations.objective,
        "source_grouping": words[rotations.grouping],
    }
    if rotations.format_version == 3:
        top["transform"] = _transform(rotations)
    top["layers"] = {layer.layer_id: _layer(layer, rotations) for layer in rotations.layers}
    if len(top["layers"]) != len(rotations.layers):
        raise UsageError("a layer id occurs twice.")
    if rotations.calibration:
        top["calibration"] = dict(sorted(rotations.calibration.items()))
    return top


def _transform(rotations: RotationSet) -> dict[str, Any]:
    if rotations.declared_role is None:
        raise UsageError(
            f"the objective {rotations.objective!r} does not say whether it is for keys or values."
        )
    ends = {"orthogonal": rotations.orthogonal}
    if rotations.declared_role == "k":
        return {"key": rotations.transform, "centered": rotations.centered, **ends}
    return {"value": rotations.transform, **ends}


def _layer(layer: LayerTransform, rotations: RotationSet) -> dict[str, Any]:
    entry: dict[str, Any] = {"layer_id": layer.layer_id, "rotation": layer.forward}
    if not rotations.orthogonal:
        entry[PARTNER[rotations.declared_role or "k"]] = layer.partner
    if layer.mean is not None:
        entry["k_mean"] = layer.mean
    if layer.eigenvalues is not None:
        entry["eigenvalues"] = layer.eigenvalues
    elif rotations.format_version == 3:
        entry["eigenvalues"] = None
    if layer.feedback is not None:
        entry["k_feedback"] = layer.feedback
    return entry


class _Pickle:
    """A protocol 2 pickle without memo: every value is spelled out where it is used."""

    def __init__(self, *, share: bool) -> None:
        self.parts: list[bytes] = [b"\x80\x02"]
        self.records: list[bytes] = []
        self.keys: dict[bytes, int] | None = {} if share else None

    def finish(self) -> bytes:
        return b"".join((*self.parts, b"."))

    def value(self, value: Any) -> None:
        if isinstance(value, np.ndarray):
            self.tensor(value)
        elif isinstance(value, Mapping):
            self.parts.append(b"}")
            for key, item in value.items():
                self.value(key)
                self.value(item)
                self.parts.append(b"s")
        else:
            self.parts.append(_scalar(value))

    def tensor(self, array: Array) -> None:
        if array.dtype != np.float32 or not array.size:
            raise UsageError(
                f"rotation files hold float32, got {array.dtype} of shape {list(array.shape)}."
            )
        key = str(self.record(np.ascontiguousarray(array, dtype="<f4").tobytes()))
        strides = (math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim))
        self.parts += [
            b"ctorch._utils\n_rebuild_tensor_v2\n(",
            b"(" + _scalar("storage") + b"ctorch\nFloatStorage\n" + _scalar(key) + _scalar("cpu"),
            _scalar(int(array.size)) + b"tQ" + _scalar(0),
            b"(" + b"".join(map(_scalar, array.shape)) + b"t",
            b"(" + b"".join(map(_scalar, strides)) + b"t",
            b"\x89ccollections\nOrderedDict\n)RtR",
        ]

    def record(self, content: bytes) -> int:
        if self.keys is not None and content in self.keys:
            return self.keys[content]
        self.records.append(content)
        if self.keys is not None:
            self.keys[content] = len(self.records) - 1
        return len(self.records) - 1


def _scalar(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode()
        return b"X" + struct.pack("<I", len(text)) + text
    raise UsageError(f"rotation files cannot hold a {type(value).__name__}.")


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + struct.pack("<B", value)
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = (value.bit_length() >> 3) + 1
    return b"\x8a" + struct.pack("<B", size) + value.to_bytes(size, "little", signed=True)
