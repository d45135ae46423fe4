"""Attention of a few new tokens over codes and windows in plain torch, for CPUs and other devices
without kernels.

Scales and offsets are applied to products and weights instead of rows, and codes are made numbers
in blocks, which stay in the caches of a core.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oscar_kernels.spec import QuantSpec, code_bytes
from oscar_zoo.engines.transformers.rows import Rows
from oscar_zoo.models.attention import Softmax

BLOCK = 1 << 19
"""Channels that are made numbers at once, 1 MB."""


def attend(rows: Rows, query: Tensor, softmax: Softmax, shift: Tensor | None) -> Tensor:
    """Attention of the last tokens of a batch. Each reads what it would read if the tokens had come
    one by one.

    Args:
        rows: the new tokens are among them.
        query: `[T, B, num_q_heads, head_dim]` float32, transformed.
        shift: `[B, num_q_heads, T, 1]`, added to the scaled products; `None` for nothing.

    Returns:
        `[T, B, num_q_heads, v_head_dim]` float32, transformed.
    """
    shifts = [None] * rows.batch if shift is None else shift
    outs = [_of_one(rows, b, query[:, b], softmax, shifts[b]) for b in range(rows.batch)]
    return torch.stack(outs, 1)


def _of_one(rows: Rows, b: int, query: Tensor, softmax: Softmax, shift: Tensor | None) -> Tensor:
    store, pad, n, new = rows.store, rows.steps.pads[b], rows.length, len(query)
    heads = store.num_kv_heads
    if n <= pad:  # all of it is padding so far
        return query.new_zeros(*query.shape[:2], store.v_spec.head_dim)
    q = query.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # `[H, G, T, d]`
    group, q = q.shape[1], q.flatten(1, 2)
    # From here on a token reads the window, and all tokens before it but the first ones as codes.
    starts = [max(rows.ring_from, n - new + t + 1 - store.recent) for t in range(new)]
    sinks = pad + min(store.sink, n - pad)
    coded = range(sinks, max(sinks, starts[-1]))
    ring = range(max(sinks, starts[0]), n)
    at = torch.arange(ring.start - pad, n - pad, device=q.device) % store.ring_rows

    def exact(sink: Tensor, recent: Tensor) -> Tensor:
        return torch.cat([sink[b, : sinks - pad], recent[b, at]]).float().transpose(0, 1)

    logits = torch.cat([q @ exact(store.sink_k, store.ring_k).mT, _products(rows, b, coded, q)], -1)
    logits = logits.unflatten(1, (group, new)).flatten(0, 1) * softmax.scaling  # `[Hq, T, rows]`
    logits = softmax.capped(logits if shift is None else logits + shift)
    if new > 1:
        seen = _mask(pad, n, sinks, ring, coded, starts, q.device)
        logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)  # padding sees nothing
    weights = softmax.weights(logits).unflatten(0, (heads, group)).flatten(1, 2)
    of_exact, of_codes = weights.split([sinks - pad + len(ring), len(coded)], -1)
    out = of_exact @ exact(store.sink_v, store.ring_v) + _sums(rows, b, coded, of_codes)
    return out.unflatten(1, (group, new)).permute(2, 0, 1, 3).flatten(1, 2)


def _mask(
    pad: int, n: int, sinks: int, ring: range, coded: range, starts: list[int], device: torch.device
) -> Tensor:
    """`[T, rows]`, true where a new token reads a row: of first tokens, the ring, codes."""
    token = torch.arange(n - len(starts), n, device=device)[:, None]
    start = torch.tensor(starts, device=device)[:, None]
    first, recent, rest = (
        torch.arange(x.start, x.stop, device=device) for x in (range(pad, sinks), ring, coded)
    )
    return torch.cat([first <= token, (recent >= start) & (recent <= token), rest < start], 1)


def _blocks(
    rows: Rows, b: int, tokens: range, spec: QuantSpec, part: tuple[slice, slice]
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Codes of keys or values, `[4, H, n, quarter of a row]` float32, with scales and offsets,
    `[groups, H, 1, n]`, of stretches of `tokens`; the slice is of `tokens`."""
    codes, affine = (
        x.unflatten(0, (-1, rows.batch))[tokens.start : tokens.stop, b, :, own]
        for x, own in zip((rows.store.codes, rows.store.affine), part, strict=True)
    )
    size, quarter = max(1, BLOCK // (codes.shape[1] * spec.head_dim)), spec.head_dim // 4
    for first in range(0, len(tokens), size):
        own = slice(first, first + size)
        packed = codes[own].transpose(0, 1).contiguous().unflatten(-1, (-1, quarter))
        numbers = affine.new_empty(4, *packed.shape[:2], quarter, dtype=torch.float32)
        for at in range(4):  # a copy for each, because whole quarters are contiguous
            byte, index = divmod(at, 8 // spec.bits)
            shifted = packed[:, :, byte] >> spec.bits * index
            numbers[at].copy_(shifted.bitwise_and_(spec.levels - 1))
        both = affine[own].float().unflatten(-1, (spec.num_groups, 2)).permute(3, 2, 1, 0)
        yield own, numbers, *both[:, :, :, None]


def _products(rows: Rows, b: int, tokens: range, query: Tensor) -> Tensor:
    """Products with keys, `[H, M, n]`, of a query `[H, M, d]`."""
    spec = rows.spec.k
    part = slice(0, code_bytes(spec)), slice(0, 2 * spec.num_groups)
    q = query.unflatten(-1, (4, -1)).permute(2, 0, 1, 3).contiguous()
    by_group = spec.num_groups, 4 // spec.num_groups
    sums = q.sum(-1, keepdim=True).unflatten(0, by_group).sum(1)
    found = query.new_empty(*query.shape[:2], len(tokens))
    for own, codes, scale, offset in _blocks(rows, b, tokens, spec, part):
        products = (q @ codes.mT).unflatten(0, by_group).sum(1)
        found[..., own] = torch.addcmul(sums * offset, products, scale).sum(0)
    return found


def _sums(rows: Rows, b: int, tokens: range, weights: Tensor) -> Tensor:
    """Weighted sums of values, `[H, M, dv]`, for weights `[H, M, n]`."""
    spec, k = rows.spec.v, rows.spec.k
    part = slice(code_bytes(k), None), slice(2 * k.num_groups, None)
    total = weights.new_zeros(4, *weights.shape[:2], spec.head_dim // 4)
    for own, codes, scale, offset in _blocks(rows, b, tokens, spec, part):
        w = weights[..., own]
        of_groups = torch.stack([w * scale, w * offset]).repeat_interleave(4 // spec.num_groups, 1)
        total += of_groups[0] @ codes + of_groups[1].sum(-1, keepdim=True)
    return total.permute(1, 2, 0, 3).flatten(2)
