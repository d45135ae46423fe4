"""Packing slots in plain torch: the definition of what the kernel copies."""

from __future__ import annotations

from torch import Tensor


def pack_slots(table: Tensor, rows: Tensor, kv_indptr: Tensor, out: Tensor) -> None:
    """Copy `table[rows[b], :n]`, where `n = kv_indptr[b + 1] - kv_indptr[b]`, to
    `out[kv_indptr[b] :]`, for every request `b`.

    Args:
        table: `[R, most tokens]` integers, the engine's slots by row and position.
        rows: `[B]` integers, the row of each request.
        kv_indptr: `[B + 1]` integers, starts at 0 and never falls.
        out: `[>= kv_indptr[B]]` integers. Entries from `kv_indptr[B]` on are not modified.
    """
    if kv_indptr.numel() != rows.numel() + 1:
        raise ValueError(f"rows {tuple(rows.shape)} and kv_indptr {tuple(kv_indptr.shape)}")
    bounds = kv_indptr.tolist()
    for row, first, last in zip(rows.tolist(), bounds[:-1], bounds[1:], strict=True):
        out[first:last] = table[row, : last - first]
