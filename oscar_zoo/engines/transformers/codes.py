"""The attention of `oscar_kernels.reference.decode_attention`, two to five times as fast on a CPU.

Scales and offsets are applied to products and weights instead of rows, and codes are made numbers
in blocks, which stay in the caches of a core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.reference import apply_o_partner
from oscar_kernels.spec import code_bytes

BLOCK = 1 << 19
"""Channels that are made numbers at once, 2 MB."""


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    sink_logits: Tensor | None = None,
    o_partner: Tensor | None = None,
    drafts: Drafts | None = None,
    **_: Any,
) -> Tensor:
    """See the reference. Drafts are a chain, and all sinks are there."""
    count = 1 if drafts is None else drafts.count
    parts = [*zip(*(x.split(count) for x in (query, sink_logits) if x is not None), strict=True)]
    found = [_of_one(cache, batch, b, sm_scale, logit_cap, *part) for b, part in enumerate(parts)]
    return apply_o_partner(torch.cat(found), o_partner)


def _of_one(
    cache: LayerCache,
    batch: BatchView,
    b: int,
    scale: float,
    cap: float,
    query: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """`[T, num_q_heads, v_head_dim]` of the last tokens of a sequence; argument `[T, ..]`."""
    first, last = batch.kv_indptr[b : b + 2].tolist()
    new, heads, row = len(query), cache.num_kv_heads, int(batch.rows[b])
    at = torch.arange(last - first, device=query.device)
    end = at[-new:, None] + 1
    # From here on a token reads the window, and all tokens before it but the first ones as codes.
    start = (end - cache.recent).clamp(min=int(batch.windows.ring_start[row]))
    ring, coded = (part & (at >= cache.sink) for part in (at >= start[0], at < start[-1]))
    sink, ring, coded = at[: cache.sink], at[ring], at[coded]
    seen = torch.cat([sink < end, (ring >= start) & (ring < end), coded < start], 1)
    slots = batch.kv_indices[first:last][coded]

    def exact(sinks: Tensor, rings: Tensor) -> Tensor:
        block = sinks[int(batch.windows.sink_block[row]), : len(sink)]
        return torch.cat([block, rings[row, ring % cache.ring_rows]]).float().transpose(0, 1)

    q = query.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, G, T, d]
    group, q = q.shape[1], q.flatten(1, 2)
    products = q @ exact(cache.sink_k, cache.ring_k).mT, _products(cache, slots, q)
    logits = torch.cat(products, -1).unflatten(1, (group, new)) * scale
    logits = logits if not cap else cap * torch.tanh(logits / cap)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.T.reshape(heads, group, new, 1)], -1)
    weights = logits.softmax(-1)[..., : seen.shape[1]].flatten(1, 2)
    of_exact, of_codes = weights.split([len(sink) + len(ring), len(coded)], -1)
    out = of_exact @ exact(cache.sink_v, cache.ring_v) + _sums(cache, slots, of_codes)
    return out.unflatten(1, (group, new)).permute(2, 0, 1, 3).flatten(1, 2)


def _blocks(
    cache: LayerCache, slots: Tensor, values: bool
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Codes of keys or `values`, `[4, H, n, quarter of a row]` float32, with scales and offsets,
    `[groups, H, 1, n]`, of stretches of `slots`, which the slice says."""
    spec, k = (cache.v_spec if values else cache.k_spec), cache.k_spec
    bounds = zip((cache.codes, cache.affine), (code_bytes(k), 2 * k.num_groups), strict=True)
    parts = [(x, slice(at, None) if values else slice(at)) for x, at in bounds]
    size, quarter = max(1, BLOCK // (cache.num_kv_heads * spec.head_dim)), spec.head_dim // 4
    for first in range(0, len(slots), size):
        own = slice(first, first + size)
        codes, affine = (x.index_select(0, slots[own])[..., part] for x, part in parts)
        packed = codes.transpose(0, 1).contiguous().unflatten(-1, (-1, quarter))
        numbers = torch.empty(4, *packed.shape[:2], quarter, device=slots.device)
        for at in range(4):  # a copy for each, because whole quarters are contiguous
            byte, index = divmod(at, 8 // spec.bits)
            shifted = packed[:, :, byte] >> spec.bits * index
            numbers[at].copy_(shifted.bitwise_and_(spec.levels - 1))
        both = affine.float().unflatten(-1, (-1, 2)).permute(3, 2, 1, 0)
        yield own, numbers, *both[:, :, :, None]


def _products(cache: LayerCache, slots: Tensor, query: Tensor) -> Tensor:
    """Products with keys, `[H, M, n]`, of a query `[H, M, d]`."""
    q = query.unflatten(-1, (4, -1)).permute(2, 0, 1, 3).contiguous()
    by_group = cache.k_spec.num_groups, 4 // cache.k_spec.num_groups
    sums = q.sum(-1, keepdim=True).unflatten(0, by_group).sum(1)
    found = query.new_empty(*query.shape[:2], len(slots))
    for own, codes, scale, offset in _blocks(cache, slots, values=False):
        products = (q @ codes.mT).unflatten(0, by_group).sum(1)
        found[..., own] = torch.addcmul(sums * offset, products, scale).sum(0)
    return found


def _sums(cache: LayerCache, slots: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of values, `[H, M, dv]`, for weights `[H, M, n]`."""
    spec = cache.v_spec
    total = weights.new_zeros(4, *weights.shape[:2], spec.head_dim // 4)
    for own, codes, scale, offset in _blocks(cache, slots, values=True):
        w = weights[..., own]
        of_groups = torch.stack([w * scale, w * offset]).repeat_interleave(4 // spec.num_groups, 1)
        total += of_groups[0] @ codes + of_groups[1].sum(-1, keepdim=True)
    return total.permute(1, 2, 0, 3).flatten(2)
