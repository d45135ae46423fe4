"""The moments file: every method can be fitted from it without the model and without the data.

It is one safetensors file with the lower triangles of the matrices in float64. Nothing is lost by
that: fits from the file equal fits from memory, a capture continues from it as if it had never
stopped, and the same moments give the same bytes. One key of the metadata holds the rest as
canonical JSON, schema `oscar-zoo.moments/1`: model, calibration, coverage and numerics as in a
manifest, the sequences that were seen, and the number of rows of each layer. Another key holds the
sha256 of the description and the sums, so that damage is noticed at every read; files of earlier
releases have none. The reader trusts none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from oscar_zoo.artifact import durable, strict_json, tensor_file
from oscar_zoo.artifact.files import read_file, refuse_mistaken, sha256_hex
from oscar_zoo.artifact.manifest import Calibration, Coverage, ModelBlock, MomentsFile, Numerics
from oscar_zoo.artifact.specs import Count, Harness, Hex64, Spec, validated
from oscar_zoo.compute import coverage
from oscar_zoo.compute.coverage import check_finite, needs_met, observed
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed, MalformedFile, malformed_hint
from oscar_zoo.version import __version__

SCHEMA = "oscar-zoo.moments/1"
KEY = "oscar-zoo.moments"
"""Key of the metadata that holds everything except the tensors."""

MAX_BYTES = 2 << 30
_AGAIN = "compute it again (`oscar-zoo compute`), or copy it again from where it came from"
MAX_HEADER = tensor_file.LONGEST_HEADER

_NAMES = (*ROW_SUMS, *WEIGHTED_SUMS, "wo")
_KEY_SUMS = ("qq", "kk", "k_sum")
"""Sums that are as wide as a key; the others are as wide as a value."""
_VECTORS = ("k_sum", "v_sum", "sst_den")
_PART: Mapping[str, str] = {**dict.fromkeys(WEIGHTED_SUMS, "weighted_tokens"), "oo": "output_rows"}
"""Sums that a layer may lack -> the count that says whether it has them."""

Rows = Annotated[int, Field(ge=0, lt=1 << 53)]


class SequenceRecord(Spec):
    """A token sequence that was summed.

    It holds the sha256 of the compact JSON list of its ids, and their number.
    """

    sha256: Hex64
    tokens: Count

    @classmethod
    def of(cls, ids: tuple[int, ...] | list[int]) -> SequenceRecord:
        """The record of the sequence `ids`."""
        return cls(sha256=sha256_hex(strict_json.canonical_bytes(list(ids))), tokens=len(ids))


class MomentsInfo(Spec):
    """The source of moments, in blocks as in a manifest.

    `sequences` are those summed so far, in order; `partial` moments may lack layers, heads, sums or
    tokens, as those of one rank or of an interrupted capture do. `coverage` may be null only then.
    """

    model: ModelBlock
    calibration: Calibration | None
    coverage: Coverage | None
    numerics: Numerics
    sequences: tuple[SequenceRecord, ...]
    partial: bool = False
    tool: Harness = Field(default_factory=lambda: Harness(name="oscar-zoo", version=__version__))


class _Layer(Spec):
    """Row counts of one layer, as in `LayerMoments`."""

    id: Rows
    tokens: Rows
    query_rows: Rows
    output_rows: Rows
    weighted_tokens: Rows
    weights: bool

    def has(self, name: str) -> bool:
        """Whether the layer has the sum `name`."""
        if name == "wo":
            return self.weights
        return name not in _PART or getattr(self, _PART[name]) > 0


class _Content(Spec):
    schema_: Literal["oscar-zoo.moments/1"] = Field(alias="schema")
    info: MomentsInfo
    heads: tuple[Rows, ...]
    layers: tuple[_Layer, ...]


def save_moments(path: Path, moments: Moments, info: MomentsInfo) -> MomentsFile:
    """Write a moments file in one step: the old content stands until the new one is whole.

    Args:
        path: its folder exists; an older file is replaced.
        moments: unless `info.partial`, complete in every sum that any layer has.
    """
    data = moments_bytes(moments, info)
    with durable.storage_errors(f"cannot write {path}"):
        durable.replace_file(path, data)
    return MomentsFile(sha256=sha256_hex(data), size=len(data), location=path.name)


def moments_bytes(moments: Moments, info: MomentsInfo) -> bytes:
    """The content of the file; see `save_moments`."""
    _check(moments, info)
    ids = sorted(moments.layers)
    layers = [moments.layers[layer_id] for layer_id in ids]
    table = tuple(
        _Layer(
            id=layer_id,
            tokens=layer.tokens,
            query_rows=layer.query_rows,
            output_rows=layer.output_rows,
            weighted_tokens=layer.weighted_tokens,
            weights=layer.wo is not None,
        )
        for layer_id, layer in zip(ids, layers, strict=True)
    )
    tensors: dict[str, tensor_file.Array] = {}
    for name in _NAMES:
        stack = [
            getattr(layer, name)
            for layer, entry in zip(layers, table, strict=True)
            if entry.has(name)
        ]
        if stack:
            tensors[name] = _packed(torch.stack(stack), vector=name in _VECTORS)
    content = _Content(schema="oscar-zoo.moments/1", info=info, heads=layers[0].heads, layers=table)
    text = strict_json.canonical_bytes(content.model_dump(mode="json", by_alias=True)).decode()
    return tensor_file.write(tensors, {KEY: text}, checksum=True)


def load_moments(path: Path) -> tuple[Moments, MomentsInfo]:
    """Read a moments file of anybody.

    Returns:
        The moments, float64 on the CPU, and what they were computed from.
    """
    return parse_moments(read_file(path, max_bytes=MAX_BYTES), what=str(path))


@malformed_hint(_AGAIN)
def parse_moments(data: bytes, *, what: str = "the moments file") -> tuple[Moments, MomentsInfo]:
    """The content of an untrusted moments file; see `load_moments`."""
    refuse_mistaken(data, what=what)
    tensors, metadata = tensor_file.read_with_metadata(data, what=what, max_header=MAX_HEADER)
    content = _content(metadata, what)
    moments = _moments(tensors, content, what)
    try:
        _check(moments, content.info)
    except ComputeFailed as error:
        raise MalformedFile("moments.coverage", f"{what}: {error.message}") from None
    return moments, content.info


def _check(moments: Moments, info: MomentsInfo) -> None:
    """Refuse moments that contradict their description."""
    layers = list(moments.layers.values())
    if moments.geometry != info.model.geometry or not layers:
        raise ComputeFailed(
            "moments of another model.", hint="save them with the model they were captured from"
        )
    if any(layer.heads != layers[0].heads for layer in layers):
        raise ComputeFailed(
            "layers hold different KV heads.", hint="join the heads of all layers first"
        )
    for layer_id, layer in moments.layers.items():
        check_finite(layer_id, layer)
    if info.partial:
        return
    coverage.check(moments, needs_met(moments) | {"rows"})
    tokens, seen, said = (
        moments.tokens,
        sum(sequence.tokens for sequence in info.sequences),
        info.coverage,
    )
    if (
        said is None
        or said != observed(moments, tp=said.tp, pp=said.pp, dp=said.dp)
        or seen != tokens
    ):
        raise ComputeFailed(
            f"moments of {tokens} tokens are described as other ones.",
            hint="partial moments must say that they are",
        )


def _packed(stack: Tensor, *, vector: bool) -> NDArray[np.float64]:
    """`[L, H, d, d]` as lower triangles `[L, H, d (d + 1) / 2]`, row by row.

    Vectors stay as they are.
    """
    array: NDArray[np.float64] = stack.cpu().numpy()
    if vector:
        return array
    rows, columns = np.tril_indices(array.shape[-1])
    return np.asarray(array[..., rows, columns])


def _unpacked(packed: NDArray[np.float64], width: int, *, vector: bool) -> Tensor:
    """The inverse of `_packed`, in memory of its own."""
    if vector:
        return torch.from_numpy(packed.copy())
    full = np.empty((*packed.shape[:-1], width, width))
    rows, columns = np.tril_indices(width)
    full[..., rows, columns] = packed
    full[..., columns, rows] = packed
    return torch.from_numpy(full)


def _content(metadata: Mapping[str, str], what: str) -> _Content:
    if metadata.keys() != {KEY}:
        raise MalformedFile(
            "moments.schema", f"{what} is no moments file.", hint="`oscar-zoo compute` writes them"
        )
    value = strict_json.loads(
        metadata[KEY].encode(), what=f"the description in {what}", max_bytes=MAX_HEADER
    )
    if type(value) is not dict or value.get("schema") != SCHEMA:
        found = value.get("schema") if type(value) is dict else None
        raise MalformedFile(
            "moments.version", f"{what} has schema {str(found)[:60]!r}, not {SCHEMA}."
        )
    return validated(_Content, value, code="moments.schema", what=what)


def _sums(
    tensors: Mapping[str, NDArray[np.float64]], content: _Content, what: str
) -> dict[int, dict[str, Tensor]]:
    """Layer id -> sum -> tensor, after names, shapes and values are checked against the header."""
    if unknown := tensors.keys() - {*_NAMES}:
        raise MalformedFile("moments.name", f"{what}: unknown entry {min(unknown)[:60]!r}.")
    geometry = content.info.model.geometry
    result: dict[int, dict[str, Tensor]] = {layer.id: {} for layer in content.layers}
    for name in _NAMES:
        owners = [layer.id for layer in content.layers if layer.has(name)]
        width = geometry.head_dim if name in _KEY_SUMS else geometry.v_head_dim
        tail = (
            () if name == "sst_den" else (width if name in _VECTORS else width * (width + 1) // 2,)
        )
        found = tensors.get(name)
        if (None if found is None else found.shape) != (
            (len(owners), len(content.heads), *tail) if owners else None
        ):
            raise MalformedFile(
                "moments.shape", f"{what}: {name} has not the shape that its model and layers need."
            )
        if found is None:
            continue
        if not np.isfinite(found).all():
            raise MalformedFile("moments.values", f"{what}: {name} has a value that is not finite.")
        for layer_id, part in zip(owners, found, strict=True):
            result[layer_id][name] = _unpacked(part, width, vector=name in _VECTORS)
    return result


def _moments(tensors: Mapping[str, NDArray[np.float64]], content: _Content, what: str) -> Moments:
    geometry = content.info.model.geometry
    ids = [layer.id for layer in content.layers]
    if not ids or ids != sorted({*ids} & {*geometry.attention_layers}):
        raise MalformedFile("moments.layers", f"{what} has other layers than its model.")
    if not content.heads or [*content.heads] != sorted(
        {*content.heads} & {*range(geometry.num_kv_heads)}
    ):
        raise MalformedFile("moments.heads", f"{what} has other KV heads than its model.")
    sums = _sums(tensors, content, what)
    layers: dict[int, LayerMoments] = {}
    for entry in content.layers:
        shape = (len(content.heads), geometry.head_dim, geometry.v_head_dim)
        layer = LayerMoments.zeros(*shape, heads=content.heads)
        for name, tensor in sums[entry.id].items():
            setattr(layer, name, tensor)
        for count in ("tokens", "query_rows", "output_rows", "weighted_tokens"):
            setattr(layer, count, getattr(entry, count))
        layers[entry.id] = layer
    return Moments(geometry, layers)
