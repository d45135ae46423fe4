"""The moments file: every method can be fitted from it without the model and without the data.

It is one safetensors file with the lower triangles of the matrices in float64. Nothing is lost by
that: fits from the file equal fits from memory, a capture continues from it as if it had never
stopped, and the same moments give the same bytes. One key of the metadata holds the rest as
canonical JSON, schema `oscar-zoo.moments/1`: model, calibration, coverage and numerics as in a
manifest, the sequences that were seen, and the number of rows of each layer. Another key holds the
sha256 of the description and the sums, so that damage is noticed at every read; files of earlier
releases have none. The reader trusts none of it.

Several files become one: the sums of their tokens add. They must have no sequence in common, or
tokens would count twice. Weighted sums (`sst`) know only the queries of their own sequences, so a
sum loses them; every other method can still be fitted from the result.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from oscar_zoo.artifact import durable, strict_json, tensor_file
from oscar_zoo.artifact.files import read_file, refuse_mistaken, sha256_hex
from oscar_zoo.artifact.manifest import (
    Calibration,
    Coverage,
    LengthStats,
    ModelBlock,
    MomentsFile,
    Numerics,
)
from oscar_zoo.artifact.specs import Count, Harness, Hex64, Spec, validated
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.compute.moments import (
    COUNTS,
    ROW_SUMS,
    WEIGHTED_SUMS,
    LayerMoments,
    Moments,
    check_finite,
)
from oscar_zoo.errors import ComputeFailed, MalformedFile, UsageError, malformed_hint
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
    """A token sequence that was summed. It holds the sha256 of the compact JSON list of its ids,
    and their number."""

    sha256: Hex64
    tokens: Count

    @classmethod
    def of(cls, ids: tuple[int, ...] | list[int]) -> SequenceRecord:
        """The record of the sequence `ids`."""
        return cls(sha256=sha256_hex(strict_json.canonical_bytes(list(ids))), tokens=len(ids))


class MomentsInfo(Spec):
    """The source of moments, in blocks as in a manifest. `sequences` are those summed so far, in
    order; `partial` moments may lack layers, sums or tokens, as those of an interrupted capture do.
    `coverage` may be null only then."""

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
    """Write a moments file in one step: the old content stands until the new one is whole."""
    data = moments_bytes(moments, info)
    with durable.storage_errors(f"cannot write {path}"):
        durable.replace_file(path, data)
    return MomentsFile(sha256=sha256_hex(data), size=len(data), location=path.name)


def moments_bytes(moments: Moments, info: MomentsInfo) -> bytes:
    """The content of the file; see `save_moments`."""
    _check(moments, info)
    entries = []
    stacks: dict[str, list[Tensor]] = {name: [] for name in _NAMES}
    for layer_id in sorted(moments.layers):
        layer = moments.layers[layer_id]
        counts = {count: getattr(layer, count) for count in COUNTS}
        entries.append(_Layer(id=layer_id, weights=layer.wo is not None, **counts))
        for name in filter(entries[-1].has, _NAMES):
            stacks[name].append(getattr(layer, name))
    tensors: dict[str, tensor_file.Array] = {
        name: _packed(torch.stack(stack), vector=name in _VECTORS)
        for name, stack in stacks.items()
        if stack
    }
    content = _Content(
        schema="oscar-zoo.moments/1",
        info=info,
        heads=tuple(range(moments.geometry.num_kv_heads)),
        layers=tuple(entries),
    )
    text = strict_json.canonical_bytes(content.model_dump(mode="json", by_alias=True)).decode()
    return tensor_file.write(tensors, {KEY: text}, checksum=True)


def load_moments(path: Path) -> tuple[Moments, MomentsInfo]:
    """Read a moments file of anybody."""
    return parse_moments(read_file(path, max_bytes=MAX_BYTES), what=str(path))


@malformed_hint(_AGAIN)
def parse_moments(data: bytes, *, what: str = "the moments file") -> tuple[Moments, MomentsInfo]:
    """The content of an untrusted moments file; see `load_moments`."""
    refuse_mistaken(data, what=what)
    tensors, metadata = tensor_file.read_with_metadata(data, what=what, max_header=MAX_HEADER)
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
    content = validated(_Content, value, code="moments.schema", what=what)
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
    for layer_id, layer in moments.layers.items():
        check_finite(layer_id, layer)
    if info.partial:
        return
    moments.check(moments.needs_met() | {"rows"})
    tokens, said = moments.tokens, info.coverage
    covered = said is not None and said == moments.observed(tp=said.tp, pp=said.pp, dp=said.dp)
    if not covered or sum(sequence.tokens for sequence in info.sequences) != tokens:
        raise ComputeFailed(
            f"moments of {tokens} tokens are described as other ones.",
            hint="partial moments must say that they are",
        )


def _packed(stack: Tensor, *, vector: bool) -> NDArray[np.float64]:
    """`[L, H, d, d]` as lower triangles `[L, H, d (d + 1) / 2]`, row by row. Vectors stay as they
    are."""
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


def _moments(tensors: Mapping[str, NDArray[np.float64]], content: _Content, what: str) -> Moments:
    """The sums, after names, shapes and values are checked against the description."""
    geometry = content.info.model.geometry
    ids = [layer.id for layer in content.layers]
    if not ids or ids != sorted({*ids} & {*geometry.attention_layers}):
        raise MalformedFile("moments.layers", f"{what} has other layers than its model.")
    if content.heads != tuple(range(geometry.num_kv_heads)):
        raise MalformedFile("moments.heads", f"{what} has other KV heads than its model.")
    if unknown := tensors.keys() - {*_NAMES}:
        raise MalformedFile("moments.name", f"{what}: unknown entry {min(unknown)[:60]!r}.")
    sums: dict[int, dict[str, Any]] = {
        layer.id: {count: getattr(layer, count) for count in COUNTS} for layer in content.layers
    }
    for name in _NAMES:
        owners = [layer.id for layer in content.layers if layer.has(name)]
        width = geometry.head_dim if name in _KEY_SUMS else geometry.v_head_dim
        inner = (width,) if name in _VECTORS else (width * (width + 1) // 2,)
        tail = () if name == "sst_den" else inner
        wanted = (len(owners), geometry.num_kv_heads, *tail) if owners else None
        found = tensors.get(name)
        if (None if found is None else found.shape) != wanted:
            raise MalformedFile(
                "moments.shape", f"{what}: {name} has not the shape that its model and layers need."
            )
        if found is None:
            continue
        if not np.isfinite(found).all():
            raise MalformedFile("moments.values", f"{what}: {name} has a value that is not finite.")
        for layer_id, part in zip(owners, found, strict=True):
            sums[layer_id][name] = _unpacked(part, width, vector=name in _VECTORS)
    shape = (geometry.num_kv_heads, geometry.head_dim, geometry.v_head_dim)
    return Moments(
        geometry, {at: replace(LayerMoments.zeros(*shape), **given) for at, given in sums.items()}
    )


_AXES = ("tp", "pp", "dp")
LOST_WEIGHTS = (
    "the weighted value sums were left out: "
    f"{' and '.join(name for name, method in METHODS.items() if 'weighted' in method.needs)}"
    " need one capture of all sequences."
)


def merge_files(
    paths: Sequence[Path], out: Path
) -> tuple[MomentsFile, MomentsInfo, tuple[str, ...]]:
    """Merge moments files, two or more, into the file `out`, which is replaced; what was written,
    and remarks for the user."""
    if len(paths) < 2:
        raise UsageError("there is nothing to merge.", hint="name two moments files or more")
    parts = [(str(path), *load_moments(path)) for path in paths]
    first = parts[0][2]
    for name, _, info in parts:
        _check_same_source(first, info, f"{parts[0][0]} and {name}")
        if not info.sequences:
            raise UsageError(f"{name} does not say which sequences it holds.", hint="capture again")
    # the same sums, whatever the order of the files
    parts.sort(key=lambda part: sorted(one.sha256 for one in part[2].sequences))
    owners: dict[str, str] = {}
    for name, _, info in parts:
        for sha256 in dict.fromkeys(one.sha256 for one in info.sequences):
            if sha256 in owners:
                raise UsageError(
                    f"{owners[sha256]} and {name} have sequences in common, which would count"
                    " twice.",
                    hint="capture parts of the data that do not overlap",
                )
            owners[sha256] = name
    whole, infos = parts[0][1], [info for _, _, info in parts]
    notes = [LOST_WEIGHTS] if any("weighted" in one.needs_met() for _, one, _ in parts) else []
    for _, moments, _ in parts:
        for layer in moments.layers.values():
            for name in WEIGHTED_SUMS:
                setattr(layer, name, torch.zeros_like(getattr(layer, name)))
            layer.weighted_tokens = 0
        if moments is not whole:
            whole.merge(moments)
    partial = False
    try:
        whole.check(whole.needs_met() | {"rows"})
    except ComputeFailed as error:
        partial = True
        notes.append(f"parts are missing: {error.message.partition(': ')[2] or error.message}")
    tp, pp, dp = (max(getattr(one.coverage, axis, 1) for one in infos) for axis in _AXES)
    devices = " + ".join(dict.fromkeys(one.numerics.device for one in infos))
    info = MomentsInfo(
        model=first.model,
        calibration=_calibration(infos),
        coverage=whole.observed(tp=tp, pp=pp, dp=max(dp, len(parts))),
        numerics=first.numerics.model_copy(update={"device": devices}),
        sequences=tuple(sequence for one in infos for sequence in one.sequences),
        partial=partial,
    )
    return save_moments(out, whole, info), info, tuple(notes)


def _check_same_source(one: MomentsInfo, other: MomentsInfo, names: str) -> None:
    """Refuse to mix models or numerics."""

    def differs(mine: Spec, theirs: Spec, fields: Iterable[str]) -> str | None:
        for name in fields:
            values = [getattr(side, name) for side in (mine, theirs)]
            if values[0] != values[1]:
                here, there = (
                    f"{x.name} {x.version}" if isinstance(x, Harness) else str(x)[:100]
                    for x in values
                )
                return f"{name} is {here} here and {there} there"
        return None

    if what := differs(one.model, other.model, ModelBlock.model_fields):
        raise UsageError(f"{names} are of different models: {what}.", hint="merge parts of one")
    if what := differs(one.numerics, other.numerics, ("forward_dtype", "accumulate", "engine")):
        raise UsageError(
            f"{names} were computed differently: {what}.",
            hint="capture both with one engine, version and dtype",
        )


def _calibration(infos: Sequence[MomentsInfo]) -> Calibration | None:
    """One calibration block for all captures. A value that they do not share becomes null, and no
    hash is invented."""
    blocks = [info.calibration for info in infos if info.calibration is not None]
    if len(blocks) != len(infos):
        return None
    first, shared = blocks[0], ("revision", "split", "license", "content", "chat_template", "seed")
    common = {
        name: getattr(first, name)
        for name in shared
        if all(getattr(block, name) == getattr(first, name) for block in blocks)
    }
    lengths = [sequence.tokens for info in infos for sequence in info.sequences]
    requested = [block.tokens_requested for block in blocks]
    proven = [set(block.disjoint_from or ()) for block in blocks]
    disjoint = tuple(
        one for one in first.disjoint_from or () if all(one in some for some in proven)
    )
    return Calibration(
        **{"revision": None, "split": None, "license": None, "chat_template": None, "seed": None}
        | {"content": "mixed"}
        | common,
        dataset=" + ".join(dict.fromkeys(block.dataset or "?" for block in blocks)),
        prompts_sha256=None,
        sequences=len(lengths),
        tokens_requested=sum(n for n in requested if n) if all(requested) else None,
        tokens_used=sum(lengths),
        length=LengthStats(
            min=min(lengths), median=statistics.median_low(lengths), max=max(lengths)
        ),
        disjoint_from=disjoint if all(b.disjoint_from is not None for b in blocks) else None,
        overlaps_with=tuple(dict.fromkeys(name for b in blocks for name in b.overlaps_with)),
    )
