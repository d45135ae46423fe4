"""Shapes that benchmarks measure, and memory for one layer each: random tokens, random slots,
running requests.

On a GPU rows are bfloat16. Elsewhere they are float32, the one type that Triton's interpreter gets
right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from roofline import Heads
from torch import Tensor

from oscar_kernels.cache import (
    BatchView,
    LayerCache,
    TokenTargets,
    Transforms,
    WindowState,
    allocate,
)
from oscar_kernels.spec import QuantSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

QWEN3_8B = Heads(
    QuantSpec(128, 128, 0.96),
    QuantSpec(128, 128, 0.92),
    num_kv_heads=8,
    group=4,
    sink=64,
    recent=256,
)
"""The shape of Qwen3-8B: 32 query heads and 8 KV heads of 128, windows of 64 and 256."""

TINY = Heads(
    QuantSpec(64, 64, 0.96), QuantSpec(64, 64, 0.92), num_kv_heads=2, group=2, sink=4, recent=8
)
"""The shape of a dry run."""

LAYERS_BYTES = 1 << 30
"""Bytes that the layers of a case read together, twenty times the L2 of an H200."""


@dataclass(frozen=True)
class WriteLayer:
    """The arguments of a write, on the device."""

    key: Tensor
    value: Tensor
    query: Tensor
    query_out: Tensor
    cache: LayerCache
    transforms: Transforms
    targets: TokenTargets
    windows: WindowState


@dataclass(frozen=True)
class AttentionLayers:
    """The arguments of attention: caches of several layers, and one batch for all of them.

    Attributes:
        query: `[B, Hq, Dk]` of decode, `[T, Hq, Dk]` of an extend.
        key, value: `[T, H, Dk]`, `[T, H, Dv]` of an extend.
        qo_indptr: `[B + 1]` of an extend.
        o_partner: `[1, Dv, Dv]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    qo_indptr: Tensor
    o_partner: Tensor
    caches: list[LayerCache]
    batch: BatchView

    @property
    def sm_scale(self) -> float:
        """Factor of the logits."""
        return float(self.query.shape[-1] ** -0.5)


def layers(moved: int, most: int) -> int:
    """Number of layers that a case needs, each with `moved` bytes, so that no layer finds its own
    bytes in the L2."""
    return min(most, max(4, -(-LAYERS_BYTES // moved)))


def write_layer(heads: Heads, lengths: list[int], new: int) -> WriteLayer:
    """A write of `new` tokens for each request, on top of `lengths` cached tokens."""
    requests, tokens = len(lengths), new * len(lengths)
    k_dim, v_dim, kv_heads = heads.k_spec.head_dim, heads.v_spec.head_dim, heads.num_kv_heads
    slots = tokens + (65536 if DEVICE == "cuda" else 8)
    request = torch.arange(requests, device=DEVICE).repeat_interleave(new)
    cached = torch.tensor(lengths, device=DEVICE)[request]
    query = normal(tokens, kv_heads * heads.group, k_dim)
    return WriteLayer(
        normal(tokens, kv_heads, k_dim),
        normal(tokens, kv_heads, v_dim),
        query,
        torch.empty_like(query),
        _cache(heads, slots, requests),
        _transforms(heads),
        TokenTargets(
            1 + torch.randperm(slots - 1, device=DEVICE)[:tokens],
            1 + request,
            cached + torch.arange(new, device=DEVICE).repeat(requests),
            cached + new,
        ),
        _windows(requests),
    )


def _transforms(heads: Heads) -> Transforms:
    """Shared by the heads; with feedback, of each head, with weights as large as in real models."""
    k_dim, v_dim = heads.k_spec.head_dim, heads.v_spec.head_dim
    if not heads.feedback:
        return Transforms(*map(_rotation, (k_dim, k_dim, v_dim, v_dim)))
    each = (_rotation(dim).repeat(heads.num_kv_heads, 1, 1) for dim in (k_dim, k_dim, v_dim, v_dim))
    weights = 0.1 * torch.randn(heads.num_kv_heads, k_dim, k_dim, device=DEVICE)
    return Transforms(*each, k_feedback=weights.triu(1).half())


def attention_layers(
    heads: Heads, lengths: list[int], count: int, *, new: int = 1, drafts: int = 0
) -> AttentionLayers:
    """`count` layers with `lengths` cached tokens, and `new` tokens for each request; or as many
    `drafts`, which are cached too."""
    cache, batch = cached_batch(heads, lengths, drafts)
    new = drafts or new
    tokens, kv_heads = new * len(lengths), heads.num_kv_heads
    return AttentionLayers(
        normal(tokens, kv_heads * heads.group, heads.k_spec.head_dim),
        normal(tokens, kv_heads, heads.k_spec.head_dim),
        normal(tokens, kv_heads, heads.v_spec.head_dim),
        torch.arange(0, tokens + 1, new, dtype=torch.int32, device=DEVICE),
        _rotation(heads.v_spec.head_dim),
        [cache, *(filled_cache(heads, lengths, drafts) for _ in range(count - 1))],
        batch,
    )


def cached_batch(heads: Heads, lengths: list[int], drafts: int = 0) -> tuple[LayerCache, BatchView]:
    """A cache that holds requests of some lengths, with drafts behind them, in slots of a random
    order."""
    cached = [length + drafts for length in lengths]
    indptr = torch.tensor([0, *cached], device=DEVICE).cumsum(0).int()
    slots = 1 + torch.randperm(sum(cached), device=DEVICE)
    rows = torch.arange(1, len(lengths) + 1, device=DEVICE)
    return filled_cache(heads, lengths, drafts), BatchView(
        indptr, slots.int(), rows, _windows(len(lengths))
    )


def filled_cache(heads: Heads, lengths: list[int], drafts: int = 0) -> LayerCache:
    """A cache of random bytes for requests of some lengths, with room for drafts behind them."""
    cache = _cache(heads, sum(lengths) + drafts * len(lengths) + 1, len(lengths), drafts)
    cache.codes.random_(0, 256)
    for x in (cache.affine, cache.ring_k, cache.ring_v, cache.sink_k, cache.sink_v):
        x.normal_()
    return cache


def normal(*shape: int) -> Tensor:
    """Random rows."""
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def _cache(heads: Heads, slots: int, requests: int, drafts: int = 0) -> LayerCache:
    return allocate(
        heads.k_spec,
        heads.v_spec,
        slots=slots,
        rows=requests + 1,
        num_kv_heads=heads.num_kv_heads,
        sink=heads.sink,
        recent=heads.recent,
        ring_rows=heads.recent + max(0, drafts - 1),
        dtype=DTYPE,
        device=DEVICE,
    )


def _windows(requests: int) -> WindowState:
    rows = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
    return WindowState(rows, torch.zeros_like(rows), torch.zeros_like(rows))


def _rotation(dim: int) -> Tensor:
    return torch.linalg.qr(torch.randn(1, dim, dim, device=DEVICE))[0].contiguous()
