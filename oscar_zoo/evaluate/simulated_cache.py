"""What a query reads from an INT2 cache: two high-precision windows, dequantized rows between.

Everything happens in the transformed basis of a layer, as in a server. Windows hold the transformed
row, rounded to the model's dtype and never clipped. Every other row goes through
`oscar_kernels.quantizer`. Attention runs in float32 over an explicit list of rows, with a mask that
says which query reads which row, so the one-pass evaluation below, the chunked server of `generate`
and the other methods of `formats` share it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oscar_kernels.quantizer import fake_quantize
from oscar_kernels.spec import QuantSpec, row_bytes
from oscar_zoo.artifact.formats import Array, Role, RotationSet
from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.specs import Geometry, ServingRecipe, Windows
from oscar_zoo.models.attention import Softmax, attend

QUERY_BLOCK = 256
"""Queries per attention call: bounds the mask, and the rows that only neighbours read."""
KEPT_TOKENS = 8192
"""Longest sequence whose masks are kept for the next layer; they take as many bytes as it has pairs
of tokens. On a GPU making them anew would wait for the device in every layer."""
BF16_BITS = 16.0
WINDOW, STORED = 0, 1
"""Forms of a row: as it is in a high-precision window, and after it was quantized."""
Stretches = tuple[tuple[int, int, int], ...]
"""Rows to read, in order: `(WINDOW or STORED, first position, end position)`."""


@dataclass(frozen=True)
class Reads:
    """Rows of keys, and as many of values of the same positions, that queries at consecutive
    positions may read; the mask, `[T, R]` bool, is true where a query reads a row."""

    k: Stretches
    v: Stretches
    mask: Tensor


class StoredSide(Protocol):
    """Keys or values of one layer, on their way into a cache: `partner`, `[d, d]` or
    `[num_kv_heads, d, d]`, is applied to queries or outputs, and `mean`, `[1 or num_kv_heads, 1,
    d]`, was taken from the rows; `None` for nothing."""

    @property
    def partner(self) -> Tensor | None: ...
    @property
    def mean(self) -> Tensor | None: ...

    def rows(self, x: Tensor) -> Tensor:
        """What the cache is given, float32: `[B, num_kv_heads, T, d]`."""

    def stored(self, rows: Tensor) -> Tensor:
        """What a query reads of such rows, float32, same shape; row `s` belongs to position `s`."""


class Simulated(Protocol):
    def check(self, model: Geometry) -> None:
        """Refuse a model that it does not fit; raises `GeometryMismatch` and `UsageError`."""

    def sides(
        self, geometry: Geometry, layer_id: int, device: torch.device
    ) -> tuple[StoredSide, StoredSide]: ...

    def reads(self, positions: Tensor) -> Reads:
        """What queries at consecutive `positions` read when they are decoded one by one."""


def take_rows(encoded: Tensor, stretches: Stretches) -> Tensor:
    """Pick rows `[B, num_kv_heads, R, d]` of one side from `[2, B, num_kv_heads, T, d]`, whose
    first index is `WINDOW` or `STORED`."""
    return torch.cat([encoded[form, :, :, first:last] for form, first, last in stretches], 2)


def window_reads(windows: Windows, positions: Tensor) -> Reads:
    """The query at position p reads row s <= p exactly when `s < sink` or `p - s < recent`."""
    sink, recent = windows.sink, windows.recent
    start, end = int(positions[0]), int(positions[-1]) + 1
    sinks = min(sink, end)
    stretches = (
        (WINDOW, 0, sinks),
        (STORED, sinks, max(sinks, end - recent)),
        (WINDOW, max(sinks, start - recent + 1), end),
    )
    masks = []
    for form, first, last in stretches:
        s = torch.arange(first, last, device=positions.device)
        exact = (s < sink) | (positions[:, None] - s < recent)
        masks.append(exact & (s <= positions[:, None]) if form == WINDOW else ~exact)
    return Reads(stretches, stretches, torch.cat(masks, 1))


def stored_reads(positions: Tensor) -> Reads:
    """Every query reads every row, its own included, as it is stored."""
    end = int(positions[-1]) + 1
    stretches = ((STORED, 0, end),)
    s = torch.arange(end, device=positions.device)
    return Reads(stretches, stretches, s <= positions[:, None])


def mixed_reads(positions: Tensor, exact_k: Tensor, exact_v: Tensor) -> Reads:
    """Reads of a method whose keys and values stay exact for different times: `exact_k`, `[T, end]`
    bool, is true where the query at one of `positions`, `[T]`, reads a key exactly."""
    seen = torch.arange(exact_k.shape[1], device=positions.device) <= positions[:, None]
    k, v, masks = [], [], []
    for form_k, of_k in ((WINDOW, exact_k), (STORED, ~exact_k)):
        for form_v, of_v in ((WINDOW, exact_v), (STORED, ~exact_v)):
            chosen = seen & of_k & of_v
            for first, last in _runs(chosen.any(0)):
                k.append((form_k, first, last))
                v.append((form_v, first, last))
                masks.append(chosen[:, first:last])
    return Reads(tuple(k), tuple(v), torch.cat(masks, 1))


def _runs(wanted: Tensor) -> Iterator[tuple[int, int]]:
    edges = torch.nn.functional.pad(wanted.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


@dataclass(frozen=True)
class CacheSpec:
    """An INT2 cache: the transform of keys and queries, and that of values and outputs."""

    k: RotationSet | None
    v: RotationSet | None
    recipe: ServingRecipe

    def check(self, model: Geometry) -> None:
        name = model.id.rpartition("/")[2] if isinstance(model, ModelBlock) else "this rank"
        sides: tuple[tuple[Role, RotationSet | None], ...] = (("k", self.k), ("v", self.v))
        for role, side in sides:
            if side is not None:
                side.require_geometry(role, model, name)
        self.recipe.check_model(model, name)

    def sides(
        self, geometry: Geometry, layer_id: int, device: torch.device
    ) -> tuple[StoredSide, StoredSide]:
        index = geometry.attention_layers.index(layer_id)
        k = self.recipe.quant_spec("k", geometry.head_dim, index)
        v = self.recipe.quant_spec("v", geometry.v_head_dim, index)
        keys = cache_side(self.k, layer_id, k, device, geometry.rotary_key or 0)
        return keys, cache_side(self.v, layer_id, v, device)

    def reads(self, positions: Tensor) -> Reads:
        return window_reads(self.recipe.windows, positions)

    def stored_bits(self, geometry: Geometry) -> float:
        """Of one element, scales and offsets included, on average over the layers. Rotary keys
        beside latents have 16 bits."""
        specs = self._specs(geometry)
        exact = len(specs) * (geometry.rotary_key or 0)
        channels = exact + sum(one.head_dim for one in specs)
        return (8 * sum(map(row_bytes, specs)) + BF16_BITS * exact) / channels

    def bits_at(self, geometry: Geometry, length: int) -> float:
        """Of all that a sequence of `length` tokens occupies: the rows, and windows on top."""
        exact = self.recipe.windows.sink + self.recipe.windows.recent
        return self.stored_bits(geometry) + BF16_BITS * exact / length

    def code_bits(self, geometry: Geometry) -> float:
        """Of the codes alone."""
        specs = self._specs(geometry)
        return sum(one.bits * one.head_dim for one in specs) / sum(one.head_dim for one in specs)

    def _specs(self, geometry: Geometry) -> list[QuantSpec]:
        layers = range(len(geometry.attention_layers))
        sides: tuple[tuple[Role, int], ...] = ("k", geometry.head_dim), ("v", geometry.v_head_dim)
        sides = sides[:1] if geometry.rotary_key else sides
        return [self.recipe.quant_spec(role, width, i) for role, width in sides for i in layers]


@dataclass(frozen=True)
class Side:
    """One side of one layer, in float32. Matrices are `[d, d]` or `[num_kv_heads, d, d]`; the mean
    is `[1 or num_kv_heads, 1, d]`; the feedback `[num_kv_heads, d, d]` float16. Of rows with more
    channels than `spec`, those behind have no codes, as rotary keys beside latents."""

    forward: Tensor | None
    partner: Tensor | None
    mean: Tensor | None
    spec: QuantSpec
    feedback: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        x = x.float() if self.mean is None else x.float() - self.mean
        return x if self.forward is None else x @ self.forward

    def stored(self, rows: Tensor) -> Tensor:
        """What a query reads of `rows` outside the windows, float32."""
        width = self.spec.head_dim
        coded = fake_quantize(rows[..., :width], self.spec, self.feedback)
        beside = rows[..., width:]
        return torch.cat([coded, beside], -1) if beside.shape[-1] else coded

    def restored(self, rows: Tensor) -> Tensor:
        x = rows if self.partner is None else rows @ self.partner.mT
        return x if self.mean is None else x + self.mean


class SimulatedLayer:
    """One layer of a cache: how rows are transformed and quantized, and how queries read them."""

    def __init__(
        self, spec: Simulated, geometry: Geometry, layer_id: int, device: torch.device
    ) -> None:
        self._k, self._v = spec.sides(geometry, layer_id, device)
        self._group = geometry.num_q_heads // geometry.num_kv_heads

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of new tokens for K and for V, each `[2, B, num_kv_heads, T, ...]` float32: index 0
        the transformed row rounded to the dtype of `key` (what the windows store), index 1 the row
        after quantization and dequantization. Given are `[B, num_kv_heads, T, ...]` after RoPE."""
        pairs = []
        for side, x in ((self._k, key), (self._v, value)):
            rows = side.rows(x)
            pairs.append(torch.stack([rows.to(x.dtype).float(), side.stored(rows)]))
        return pairs[0], pairs[1]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softmax: Softmax
    ) -> Tensor:
        """Softmax attention over transformed rows: of a `query`, `[B, num_q_heads, T, head_dim]`,
        not transformed, to any `R` rows `[B, num_kv_heads, R, ...]` float32. The mask, `[T, R]`
        bool, is true where a query reads a row. Gives `[B, num_q_heads, T, v_head_dim]` in the
        dtype of `query`, in the model's own basis."""
        b, heads, t, _ = query.shape
        kv_heads = heads // self._group
        q = query.float().unflatten(1, (kv_heads, self._group)).flatten(2, 3)
        shift = None
        if self._k.mean is not None and not softmax.plain:
            # What centred keys lack in the logits; a plain softmax ignores it.
            lacking = softmax.scaling * (q @ self._k.mean.mT)
            shift = lacking.unflatten(2, (self._group, -1)).flatten(1, 2)
        if self._k.partner is not None:
            q = q @ self._k.partner
        if softmax.plain:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, key, value, attn_mask=mask.repeat(self._group, 1), scale=softmax.scaling
            )
        else:
            by_head = q.unflatten(2, (self._group, t)).flatten(1, 2)
            out = attend(by_head, key, value, mask, softmax, shift=shift)
            out = out.unflatten(1, (kv_heads, self._group)).flatten(2, 3)
        if self._v.partner is not None:
            out = out @ self._v.partner.mT
        return out.reshape(b, heads, t, -1).to(query.dtype)


class SimulatedCache:
    """Every position of a sequence as decoding it token by token would compute it, in one pass: a
    function for `attention_scope`. Sequences start at position 0 and are not padded."""

    def __init__(self, spec: Simulated, model: Geometry, device: torch.device) -> None:
        spec.check(model)
        self._spec, self._model = spec, model
        self._kept: tuple[tuple[int, torch.device], list[tuple[Tensor, Reads]]] | None = None
        self._layers = {
            (i, device): SimulatedLayer(spec, model, i, device) for i in model.attention_layers
        }

    def with_layer_of(self, spec: Simulated, layer_id: int) -> SimulatedCache:
        """This cache, but with the layer `layer_id` of `spec`; other layers are shared."""
        changed, places = copy.copy(self), [one for one in self._layers if one[0] == layer_id]
        own = {place: SimulatedLayer(spec, self._model, *place) for place in places}
        changed._layers = self._layers | own
        return changed

    def __call__(
        self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> Tensor:
        at = layer_id, key.device
        if at not in self._layers:  # a model on several devices
            self._layers[at] = SimulatedLayer(self._spec, self._model, *at)
        layer = self._layers[at]
        k, v = layer.encode(key, value)
        blocks = []
        for p, reads in self._reads(query.shape[2], query.device):
            rows = take_rows(k, reads.k), take_rows(v, reads.v)
            blocks.append(layer.attend(query[:, :, p], *rows, reads.mask, softmax))
        return torch.cat(blocks, 2)

    def _reads(self, tokens: int, device: torch.device) -> Iterable[tuple[Tensor, Reads]]:
        if self._kept is not None and self._kept[0] == (tokens, device):
            return self._kept[1]
        blocks = torch.arange(tokens, device=device).split(QUERY_BLOCK)
        found = ((p, self._spec.reads(p)) for p in blocks)
        if tokens > KEPT_TOKENS:
            return found
        self._kept = (tokens, device), list(found)
        return self._kept[1]


def cache_side(
    rotation: RotationSet | None,
    layer_id: int,
    spec: QuantSpec,
    device: torch.device,
    beside: int = 0,
) -> Side:
    """The transform of one layer on `device`; `None` for none. It leaves channels `beside` those of
    `spec` as they are."""
    if rotation is None:
        return Side(None, None, None, spec)
    layer = next(one for one in rotation.layers if one.layer_id == layer_id)

    def tensor(array: Array) -> Tensor:
        return torch.tensor(array, dtype=torch.float32, device=device)

    matrices = tensor(layer.forward), tensor(layer.partner)
    if beside:  # latents have one KV head
        square, ones = (spec.head_dim, spec.head_dim), torch.eye(beside, device=device)
        forward, partner = (torch.block_diag(one.reshape(square), ones) for one in matrices)
        matrices = forward, partner
    mean = None if layer.mean is None else tensor(layer.mean).reshape(-1, 1, spec.head_dim)
    feedback = layer.feedback_matrix
    coded = None if feedback is None else torch.from_numpy(feedback).to(device)
    return Side(*matrices, mean, spec, coded)
