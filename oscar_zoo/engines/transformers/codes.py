"""Attention of a few new tokens over codes and windows in plain torch, for CPUs and other devices
without kernels.

Scales and offsets are applied to products and weights instead of rows, and codes are made numbers
in blocks, which stay in the caches of a core.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oscar_kernels.quantizer import unpack
from oscar_kernels.spec import QuantSpec, code_bytes
from oscar_zoo.engines.transformers.rows import Rows
from oscar_zoo.models.attention import Softmax

BLOCK = 2048
"""Tokens whose codes are made numbers at once."""


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
        logits = logits.masked_fill(
            ~_mask(pad, n, sinks, ring, coded, starts, q.device), -torch.inf
        )
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
    """Codes `[H, groups, n, channels]` float32 of keys or values, with scales and offsets, `[H,
    groups, 1, n]`, of stretches of `tokens`; the slice is of `tokens`."""
    codes, affine = (
        x.unflatten(0, (-1, rows.batch))[tokens.start : tokens.stop, b, :, own]
        for x, own in zip((rows.store.codes, rows.store.affine), part, strict=True)
    )
    for first in range(0, len(tokens), BLOCK):
        own = slice(first, first + BLOCK)
        numbers = unpack(codes[own], spec.bits).float().unflatten(-1, (spec.num_groups, -1))
        both = affine[own].float().unflatten(-1, (spec.num_groups, 1, 2)).permute(4, 1, 2, 3, 0)
        yield own, numbers.permute(1, 2, 0, 3), both[0], both[1]


def _products(rows: Rows, b: int, tokens: range, query: Tensor) -> Tensor:
    """Products with keys, `[H, M, n]`, of a query `[H, M, d]`."""
    spec = rows.spec.k
    part = slice(0, code_bytes(spec)), slice(0, 2 * spec.num_groups)
    q = query.unflatten(-1, (spec.num_groups, -1)).transpose(1, 2)
    sums = q.sum(-1, keepdim=True)
    found = query.new_empty(*query.shape[:2], len(tokens))
    for own, codes, scale, offset in _blocks(rows, b, tokens, spec, part):
        found[..., own] = torch.addcmul(sums * offset, q @ codes.mT, scale).sum(1)
    return found


def _sums(rows: Rows, b: int, tokens: range, weights: Tensor) -> Tensor:
    """Weighted sums of values, `[H, M, dv]`, for weights `[H, M, n]`."""
    spec, k = rows.spec.v, rows.spec.k
    part = slice(code_bytes(k), None), slice(2 * k.num_groups, None)
    total = weights.new_zeros(len(weights), spec.num_groups, weights.shape[1], spec.group_size)
    for own, codes, scale, offset in _blocks(rows, b, tokens, spec, part):
        w = weights[:, None, :, own]
        total += (w * scale) @ codes
        total += (w * offset).sum(-1, keepdim=True)
    return total.transpose(1, 2).flatten(2)
