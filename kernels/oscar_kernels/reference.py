"""Every op in plain torch: the definition of what kernels write, read and copy, and what CPUs run.

Attention dequantizes every cached row, or takes it from its window, and is then dense, one request
at a time, in the dtype of the query: float64 queries make it the oracle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from oscar_kernels import quantizer
from oscar_kernels.cache import (
    BatchView,
    Drafts,
    LayerCache,
    NewTokens,
    TokenTargets,
    Transforms,
    WindowState,
)
from oscar_kernels.spec import code_bytes

Parts = Literal["all", "slots", "windows"]
BLOCK = 1 << 19
"""Channels of keys that a decode step dequantizes at once, 2 MB."""


def write_kv_int2(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    *,
    windows: WindowState,
    parts: Parts = "all",
    query: Tensor | None = None,
    query_out: Tensor | None = None,
    rows_out: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Transform new tokens and write their INT2 slots, ring rows and sink rows.

    `k' = (k - k_mean) @ k_forward`, `v' = v @ v_forward`, `q' = q @ q_partner`, all in float32; of
    latents, the rotary part of keys and queries stays as it is.
    Slots get the codes of `quantizer`; ring and sinks get `k'` and `v'` themselves. If several
    tokens name the same place, it is not defined which one is stored.

    Args:
        key: `[T, H, Dk]` after RoPE, any float dtype. Not modified.
        value: `[T, H, Dv]`, the same dtype. Not modified.
        targets: where the tokens go.
        windows: `sink_block` of every row.
        parts: `slots` before the attention of an extend, `windows` after it, `all` before the
            attention of a decode.
        query: `[T, Hq, Dk]` to transform as well; query head `j` belongs to KV head
            `j // (Hq // H)`.
        query_out: `[T, Hq, Dk]` for `q'`; allocated in `query`'s dtype by default.
        rows_out: `[T, H, Dk]` and `[T, H, Dv]` for `k'` and `v'`.

    Returns:
        `q'`, or `None` without a query.
    """
    k_rows = transform_rows(key, transforms.k_forward, transforms.k_mean)
    v_rows = value.float() if cache.latent else transform_rows(value, transforms.v_forward)
    if parts != "windows":
        _write_slots(k_rows, v_rows, cache, targets, transforms.k_feedback)
    if parts != "slots":
        _write_windows(k_rows, v_rows, cache, targets, windows)
    if rows_out is not None:
        rows_out[0].copy_(k_rows)
        rows_out[1].copy_(v_rows)
    if query is None:
        return None
    out = torch.empty_like(query) if query_out is None else query_out
    width = cache.k_spec.head_dim
    out[..., :width] = transform_rows(query[..., :width], transforms.q_partner)
    out[..., width:] = query[..., width:]
    return out


def transform_rows(x: Tensor, matrix: Tensor, mean: Tensor | None = None) -> Tensor:
    """`(x - mean) @ matrix` in float32; `x` `[T, heads, D]`, heads a multiple of the matrix's
    leading dimension."""
    centred = x.float() if mean is None else x.float() - mean
    group = x.shape[1] // matrix.shape[0]
    return torch.einsum("thd,hde->the", centred, matrix.repeat_interleave(group, 0))


def _write_slots(
    k_rows: Tensor, v_rows: Tensor, cache: LayerCache, targets: TokenTargets, feedback: Any
) -> None:
    by_head = quantizer.quantize(k_rows.transpose(0, 1), cache.k_spec, feedback)
    k_codes, k_affine = (one.transpose(0, 1) for one in by_head)
    v_codes, v_affine = quantizer.quantize(v_rows, cache.v_spec)
    slots = targets.out_loc.long()
    cache.codes[slots] = torch.cat([k_codes, v_codes], -1)
    cache.affine[slots] = torch.cat([k_affine.flatten(-2), v_affine.flatten(-2)], -1)


def _write_windows(
    k_rows: Tensor, v_rows: Tensor, cache: LayerCache, targets: TokenTargets, windows: WindowState
) -> None:
    rows, positions = targets.rows.long(), targets.positions.long()
    last = positions >= targets.ends - cache.recent
    first = positions < cache.sink
    blocks = windows.sink_block.long()[rows]
    sides = (k_rows, cache.ring_k, cache.sink_k), (v_rows, cache.ring_v, cache.sink_v)
    for new, ring, sink in sides:
        if cache.recent:
            ring[rows[last], positions[last] % cache.ring_rows] = new[last].to(ring.dtype)
        if cache.sink:
            sink[blocks[first], positions[first]] = new[first].to(sink.dtype)


def materialize_prefix(
    cache: LayerCache,
    batch: BatchView,
    *,
    out_k: Tensor,
    out_v: Tensor,
    first: Tensor | None = None,
    out_indptr: Tensor | None = None,
) -> None:
    """Write the transformed rows of cached tokens, packed by request.

    Request `b` fills rows `out_indptr[b] .. out_indptr[b + 1]` with its positions from `first[b]`
    on. By default that is every position of every request. A long prefix can be read in pieces:
    with the requests' lengths `n`, piece `i` of `c` positions has `first = i * c`, and `out_indptr`
    is the running sum of `clamp(n - i * c, 0, c)`.

    Args:
        batch: the requests, their slots and windows; positions count from the first entry of each.
        out_k: `[capacity, H, Dk]`, any float dtype. Rows from `out_indptr[B]` on stay as they are.
        out_v: `[capacity, H, Dv]`.
        first: `[B]` int32 or int64, the first position of each request; 0 by default.
        out_indptr: `[B + 1]` int32 or int64, starts at 0; `batch.kv_indptr` by default. A row past
            its request's end stays as it is.
    """
    ends = batch.kv_indptr.tolist()
    places = ends if out_indptr is None else out_indptr.tolist()
    starts = [0] * len(batch.rows) if first is None else first.tolist()
    for b in range(len(batch.rows)):
        keys, values = cached_rows(cache, batch, b, torch.float32)
        count = min(
            places[b + 1] - places[b], ends[b + 1] - ends[b] - starts[b], len(out_k) - places[b]
        )
        if count > 0:
            to, of = slice(places[b], places[b] + count), slice(starts[b], starts[b] + count)
            out_k[to], out_v[to] = keys[of].to(out_k.dtype), values[of].to(out_v.dtype)


def cached_rows(
    cache: LayerCache, batch: BatchView, request: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Transformed K and V of every cached position of one request, from the tier that holds it:
    `[n, H, Dk]` and `[n, H, Dv]` of `dtype`."""
    first, last = batch.kv_indptr[request : request + 2].tolist()
    length, row = last - first, int(batch.rows[request])
    slots = batch.kv_indices[first : first + length].long()
    position = torch.arange(length, device=slots.device)
    keys, values = (x.to(dtype) for x in stored_rows(cache, slots))
    start = max(length - cache.recent, int(batch.windows.ring_start[row]))
    recent = position[position >= start]
    if len(recent):
        keys[recent] = cache.ring_k[row, recent % cache.ring_rows].to(dtype)
        values[recent] = cache.ring_v[row, recent % cache.ring_rows].to(dtype)
    block = int(batch.windows.sink_block[row])
    sink = position[int(batch.windows.sink_from[row]) : min(cache.sink, length)]
    keys[sink] = cache.sink_k[block, sink].to(dtype)
    values[sink] = cache.sink_v[block, sink].to(dtype)
    return keys, values


def stored_rows(cache: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantized `[n, H, Dk]` and `[n, H, Dv]` of slots, float32."""
    bounds = code_bytes(cache.k_spec), 2 * cache.k_spec.num_groups
    chosen = (x.index_select(0, slots).transpose(0, 1) for x in (cache.codes, cache.affine))
    pairs = (x.tensor_split([at], -1) for x, at in zip(chosen, bounds, strict=True))
    keys, values = (  # by head, as products want them
        quantizer.dequantize(codes.contiguous(), affine.unflatten(-1, (spec.num_groups, 2)), spec)
        for codes, affine, spec in zip(*pairs, (cache.k_spec, cache.v_spec), strict=True)
    )
    return keys.transpose(0, 1), values.transpose(0, 1)


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    sink_logits: Tensor | None = None,
    o_partner: Tensor | None = None,
    workspace: object = None,
    out: Tensor | None = None,
    prefix_stable: bool = False,
    drafts: Drafts | None = None,
    same_batch: bool = False,
) -> Tensor:
    """One query token per request over all its cached tokens, itself included; or all drafts of
    every request, each over what is sure and over its ancestors.

    Args:
        query: `[B, Hq, Dk]`, transformed; `[B * n, Hq, Dk]` with `n` drafts of each request.
        cache, batch: what is read; a request without tokens gets zeros.
        logit_cap: `c` for `c * tanh(logit / c)`; 0 for none.
        sink_logits: float32, `[B, Hq]` or `[B * n, Hq]`, any strides: a logit beside those of the
            tokens that takes its share of every softmax and has no value (learned sinks of
            gpt-oss).
        o_partner: `[1 | H, Dv, Dv]`; outputs become `o' @ o_partner^T`.
        workspace: unused; only launchers need one.
        out: `[B, Hq, Dv]` or `[B * n, Hq, Dv]`, written if given.
        prefix_stable: the caller promises that the kernel in front of this call on the same stream
            writes, of all rows that are read, only the newest token of each request, or its drafts,
            and that these are read from a window. A decode step can promise this.
        drafts: of every request. A node of depth `d` reads the `L` tokens that are sure where a
            decode step of length `L + d + 1` reads them, and its ancestors and itself from the
            ring. So the ring must have `recent + n - 1` rows, and the window `n`.
        same_batch: the caller promises that the batch is that of the call in front with this
            workspace, and has not changed since: that of another layer in the same step.

    Returns:
        `[B, Hq, Dv]` or `[B * n, Hq, Dv]` in the dtype of the query, or `out`.
    """
    result = query.new_zeros(*query.shape[:2], cache.out_dim)
    count = 1 if drafts is None else drafts.count
    for request in range(query.shape[0] // count):
        own = slice(request * count, (request + 1) * count)
        q = query[own].unflatten(1, (cache.num_kv_heads, -1)).permute(1, 2, 0, 3)
        sums = q.new_full((*q.shape[:3], 1), -torch.inf)
        merged = torch.zeros_like(sums)
        for *parts, seen in _blocks(cache, batch, request, drafts):
            keys, values = as_read(cache, *parts)
            logits = (q.flatten(1, 2) @ keys.to(q.dtype).mT).unflatten(1, q.shape[1:3]) * sm_scale
            if logit_cap:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            logits = logits.masked_fill(~seen, -torch.inf)
            before, sums = sums, sums.logaddexp(logits.logsumexp(-1, keepdim=True))
            new = (logits - sums).exp().flatten(1, 2) @ values.to(q.dtype)
            merged = merged * (before - sums).exp() + new.unflatten(1, q.shape[1:3])
        one, lse = (x.permute(2, 0, 1, 3).flatten(1, 2) for x in (merged, sums))
        result[own] = one if sink_logits is None else with_sink(one, lse[..., 0], sink_logits[own])
    result = apply_o_partner(result, o_partner)
    return result if out is None else out.copy_(result)


def _blocks(
    cache: LayerCache, batch: BatchView, request: int, drafts: Drafts | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows that a token or the drafts of a request read, `[H, n, Dk]` and `[H, n, Dv]`: those of
    windows, then dequantized ones; and which of them each reads, `[1 or drafts, n]` bool."""
    first, last = batch.kv_indptr[request : request + 2].tolist()
    row, slots = int(batch.rows[request]), batch.kv_indices[first:last].long()
    at, count = torch.arange(last - first, device=slots.device), drafts.count if drafts else 0
    if not len(at):
        return
    ancestors = torch.ones(max(1, count), count, dtype=torch.bool, device=at.device).tril()
    if drafts is not None and drafts.mask is not None:
        bits = drafts.mask[request * count :][:count, None].to(at.device)
        ancestors = (bits >> torch.arange(count, device=at.device)) & 1 == 1
    sure = len(at) - count
    seen = torch.cat([ancestors.new_ones(len(ancestors), sure), ancestors], 1)
    start = window_start(sure + ancestors.sum(1, keepdim=True), cache, batch.windows, row)
    recent = (at >= start) | (at >= sure)
    early = (at >= int(batch.windows.sink_from[row])) & (at < min(cache.sink, sure))
    sink, ring, coded = (at[x] for x in (early, recent.any(0) & ~early, ~recent.all(0) & ~early))
    if len(sink) + len(ring):
        block = int(batch.windows.sink_block[row])
        k, v = (
            torch.cat([sinks[block, sink], rings[row, ring % cache.ring_rows]]).transpose(0, 1)
            for sinks, rings in ((cache.sink_k, cache.ring_k), (cache.sink_v, cache.ring_v))
        )
        yield k, v, (seen & (recent | early))[:, torch.cat([sink, ring])]
    size = max(1, BLOCK // (cache.num_kv_heads * cache.k_spec.head_dim))
    for piece in coded.split(size):
        k, v = (x.transpose(0, 1) for x in stored_rows(cache, slots[piece]))
        yield k, v, (seen & ~recent)[:, piece]


def window_start(tokens: Tensor, cache: LayerCache, windows: WindowState, row: int) -> Tensor:
    """The first position in the window of a query that is the last one of so many tokens."""
    return (tokens - cache.recent).clamp(min=int(windows.ring_start[row]))


def extend_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    qo_indptr: Tensor,
    sm_scale: float,
    logit_cap: float = 0.0,
    o_partner: Tensor | None = None,
    workspace: object = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New tokens over their request's cached prefix, then causally over themselves, unquantized.

    Args:
        query, key, value: `[T, Hq, Dk]`, `[T, H, Dk]`, `[T, H, Dv]`, transformed.
        cache, batch: the prefix only; its windows are those of the prefix.
        qo_indptr: `[B + 1]`; request `b` brings the tokens
            `qo_indptr[b] .. qo_indptr[b + 1] - 1`.
        out, lse: `[T, Hq, Dv]` and float32 `[T, Hq]`, written if given.

    Returns:
        Outputs `[T, Hq, Dv]` in the dtype of the query, and the natural logarithm of the sum of
        exponentiated logits `[T, Hq]`. Tokens from `qo_indptr[B]` on get zeros and -inf.
    """
    result = query.new_zeros(*query.shape[:2], cache.out_dim)
    sums = torch.full(query.shape[:2], -torch.inf, dtype=query.dtype, device=query.device)
    for request, (first, last) in enumerate(pairwise(qo_indptr.tolist())):
        keys, values = cached_rows(cache, batch, request, query.dtype)
        new = slice(first, last)
        keys = torch.cat([keys, key[new].to(query.dtype)])
        values = torch.cat([values, value[new].to(query.dtype)])
        both = as_read(cache, keys, values)
        result[new], sums[new] = attend(query[new], *both, sm_scale, logit_cap)
    result = apply_o_partner(result, o_partner)
    return (result if out is None else out.copy_(result)), (
        sums if lse is None else lse.copy_(sums)
    )


def as_read(cache: LayerCache, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, from the two parts of rows."""
    return (torch.cat([first, second], -1), first) if cache.latent else (first, second)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, sm_scale: float, logit_cap: float
) -> tuple[Tensor, Tensor]:
    """Dense attention of the last `M` positions: `[M, Hq, Dk]` over `[n, H, Dk]`, `[n, H, Dv]`;
    output and lse."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("mhgd,nhd->mhgn", grouped, keys) * sm_scale
    if logit_cap:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    hidden = torch.ones(query.shape[0], keys.shape[0], dtype=torch.bool, device=query.device)
    hidden = hidden.triu(keys.shape[0] - query.shape[0] + 1)
    logits = logits.masked_fill(hidden[:, None, None], -torch.inf)
    outputs = torch.einsum("mhgn,nhd->mhgd", torch.softmax(logits, -1), values)
    return outputs.flatten(1, 2), torch.logsumexp(logits, -1).flatten(1, 2)


def with_sink(outputs: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Outputs of a softmax that has one more logit, without a value.

    Args:
        outputs: `[T, Hq, Dv]` of the softmax without it. Not modified.
        lse: `[T, Hq]`, the natural logarithm of its sum of exponentiated logits.
        sink_logits: `[Hq]` or `[T, Hq]`.

    Returns:
        `[T, Hq, Dv]` in the dtype of `outputs`.
    """
    share = torch.sigmoid(lse - sink_logits)
    return (outputs * share[..., None]).to(outputs.dtype)


def apply_o_partner(outputs: Tensor, o_partner: Tensor | None) -> Tensor:
    """Bring attention outputs back to the basis of the model: `o = o' @ o_partner^T`.

    Args:
        outputs: `[T, Hq, Dv]`, any float dtype. Not modified.
        o_partner: `[1 | H, Dv, Dv]`, cast to the dtype of `outputs`; `None` returns `outputs`.

    Returns:
        `[T, Hq, Dv]` in the dtype of `outputs`.
    """
    if o_partner is None:
        return outputs
    heads = outputs.unflatten(1, (o_partner.shape[0], -1))
    return torch.einsum("mhgd,hjd->mhgj", heads, o_partner.to(outputs.dtype)).flatten(1, 2)


def pack_slots(
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    kv_indptr: Tensor,
    out: Tensor,
    page: int = 1,
    step: NewTokens | None = None,
) -> None:
    """Copy the slots of `lengths[b]` tokens to `out[kv_indptr[b] :]`, for every request `b`.
    Position `p` has slot `table[rows[b], p // page] * page + p % page`.

    Args:
        table: `[R, most pages]` integers, the engine's pages by row and position; slots by default.
        rows: `[B]` integers, the row of each request.
        lengths: `[B]` integers, of the requests; with `step` one that is less than 1 counts as 1.
        kv_indptr: `[B + 1]` integers, written: 0 and the sums of the lengths.
        out: `[>= kv_indptr[B]]` integers. Entries from `kv_indptr[B]` on are not modified.
        step: of a decode step in which every request has one token that is new.
    """
    if not lengths.numel() == rows.numel() == kv_indptr.numel() - 1:
        shapes = (tuple(x.shape) for x in (rows, lengths, kv_indptr))
        raise ValueError("rows {}, lengths {} and kv_indptr {}".format(*shapes))
    if step is not None:
        lengths = lengths.clamp(min=1)
        step.out_loc.copy_(step.slots.clamp(min=0))
        step.lengths.copy_(lengths)
        step.positions.copy_(lengths - 1)
    bounds = [0, *lengths.cumsum(0).tolist()]
    kv_indptr.copy_(torch.tensor(bounds))
    for row, (first, last) in zip(rows.tolist(), pairwise(bounds), strict=True):
        at = torch.arange(last - first, device=table.device)
        out[first:last] = table[row, at // page] * page + at % page


class DraftCommit:
    """Makes accepted drafts the next tokens of their requests.

    Args:
        caches: of all layers, written; they have the same windows and stay where they are.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = caches

    def __call__(
        self,
        *,
        accepted: Tensor,
        count: int,
        rows: Tensor,
        lengths: Tensor,
        out_loc: Tensor,
        windows: WindowState,
    ) -> None:
        """Make the accepted nodes of every request its next tokens, in all layers.

        Node `j` was written to slot `out_loc[b * n + j]` and to the ring at `lengths[b] + j`. The
        node that is accepted at depth `d` is copied to slot `out_loc[b * n + d]`, to the ring at
        `lengths[b] + d`, and to the sinks if that position is one of them.

        Args:
            accepted: `[B * n]` int32; entry `b * n + d` is the node at depth `d`, or -1 from the
                first depth without an accepted node on. Nodes ascend, and none is less than its
                depth.
            rows: `[B]` int32 or int64, the row of each request.
            lengths: `[B]` int32 or int64, tokens of each request in front of its drafts.
            out_loc: `[B * n]` int32 or int64, slots of the drafts.
            windows: `sink_block` of every row.
        """
        table = accepted.view(-1, count)
        request, depth = (table >= 0).nonzero(as_tuple=True)
        node = table[request, depth].long()
        row, length = rows[request].long(), lengths[request].long()
        slots = out_loc.long().view(-1, count)
        old, new = slots[request, node], slots[request, depth]
        first = length + depth < self.caches[0].sink
        block = windows.sink_block.long()[row][first]
        for cache in self.caches:
            for store in (cache.codes, cache.affine):
                store[new] = store[old]
            for ring, sink in ((cache.ring_k, cache.sink_k), (cache.ring_v, cache.sink_v)):
                kept = ring[row, (length + node) % cache.ring_rows]
                ring[row, (length + depth) % cache.ring_rows] = kept
                sink[block, (length + depth)[first]] = kept[first]


P = ParamSpec("P")
R = TypeVar("R")


def signature_of(model: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Declare that a function takes the arguments of `model`, for type checkers and for `help`.

    The function is returned itself: a call costs no more.
    """

    def declared(function: Callable[..., R]) -> Callable[P, R]:
        named: Any = function
        named.__signature__ = inspect.signature(model)
        return function

    return declared
