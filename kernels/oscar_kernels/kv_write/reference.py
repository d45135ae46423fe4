"""Writing new tokens into the INT2 cache of one layer, in plain torch: the definition of what the
kernel writes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.quantizer import quantize

Parts = Literal["all", "slots", "windows"]


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

    `k' = (k - k_mean) @ k_forward`, `v' = v @ v_forward`, `q' = q @ q_partner`, all in float32.
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
    v_rows = transform_rows(value, transforms.v_forward)
    if parts != "windows":
        _write_slots(k_rows, v_rows, cache, targets)
    if parts != "slots":
        _write_windows(k_rows, v_rows, cache, targets, windows)
    if rows_out is not None:
        rows_out[0].copy_(k_rows)
        rows_out[1].copy_(v_rows)
    if query is None:
        return None
    out = torch.empty_like(query) if query_out is None else query_out
    return out.copy_(transform_rows(query, transforms.q_partner))


def transform_rows(x: Tensor, matrix: Tensor, mean: Tensor | None = None) -> Tensor:
    """`(x - mean) @ matrix` in float32; `x` `[T, heads, D]`, heads a multiple of the matrix's
    leading dimension."""
    centred = x.float() if mean is None else x.float() - mean
    group = x.shape[1] // matrix.shape[0]
    return torch.einsum("thd,hde->the", centred, matrix.repeat_interleave(group, 0))


def _write_slots(k_rows: Tensor, v_rows: Tensor, cache: LayerCache, targets: TokenTargets) -> None:
    (k_codes, k_affine), (v_codes, v_affine) = (
        quantize(k_rows, cache.k_spec),
        quantize(v_rows, cache.v_spec),
    )
    cache.codes[targets.out_loc.long()] = torch.cat([k_codes, v_codes], -1)
    cache.affine[targets.out_loc.long()] = torch.cat(
        [k_affine.flatten(-2), v_affine.flatten(-2)], -1
    )


def _write_windows(
    k_rows: Tensor, v_rows: Tensor, cache: LayerCache, targets: TokenTargets, windows: WindowState
) -> None:
    rows, positions = targets.rows.long(), targets.positions.long()
    last = positions >= targets.ends - cache.recent
    first = positions < cache.sink
    blocks = windows.sink_block.long()[rows]
    for new, ring, sink in (
        (k_rows, cache.ring_k, cache.sink_k),
        (v_rows, cache.ring_v, cache.sink_v),
    ):
        if cache.recent:
            ring[rows[last], positions[last] % cache.ring_rows] = new[last].to(ring.dtype)
        if cache.sink:
            sink[blocks[first], positions[first]] = new[first].to(sink.dtype)
