"""Reading cached tokens back as transformed rows, in plain torch: the definition of which tier
(sink, ring or INT2) holds each position."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernels import quantizer
from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.layout import code_bytes


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
    cache: LayerCache,
    batch: BatchView,
    request: int,
    dtype: torch.dtype,
    *,
    drafts: int = 0,
    seen: int = 0,
) -> tuple[Tensor, Tensor]:
    """Transformed K and V of every cached position of one request, from the tier that holds it.

    Args:
        drafts: last tokens of the request that are left out.
        seen: how many of these the query sees; older tokens leave its window as they do when these
            are cached.

    Returns:
        `[n, H, Dk]` and `[n, H, Dv]` of `dtype`, with `n` tokens that are no drafts.
    """
    first, last = batch.kv_indptr[request : request + 2].tolist()
    length, row = last - first - drafts, int(batch.rows[request])
    slots = batch.kv_indices[first : first + length].long()
    position = torch.arange(length, device=slots.device)
    keys, values = stored_rows(cache, slots)
    keys, values = keys.to(dtype), values.to(dtype)

    start = max(length + seen - cache.recent, int(batch.windows.ring_start[row]))
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
    split, groups = code_bytes(cache.k_spec), 2 * cache.k_spec.num_groups
    codes, affine = cache.codes[slots], cache.affine[slots]
    return (
        quantizer.dequantize(
            codes[..., :split], affine[..., :groups].unflatten(-1, (-1, 2)), cache.k_spec
        ),
        quantizer.dequantize(
            codes[..., split:], affine[..., groups:].unflatten(-1, (-1, 2)), cache.v_spec
        ),
    )
