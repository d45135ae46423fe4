"""From the engine's table of slots to a packed list: a snapshot that kernels of a CUDA graph may
read later."""

from __future__ import annotations

from torch import Tensor

from oscar_kernels import _triton

BLOCK = 1024
PROGRAMS = 64
"""Per request: a long one is copied by many."""


def pack_slots(table: Tensor, rows: Tensor, indptr: Tensor, out: Tensor) -> None:
    """Copy `table[rows[b], : indptr[b + 1] - indptr[b]]` to `out[indptr[b] :]` for every request.

    Nothing is read on the host. Bound by memory: 8 bytes per token at int32.

    Args:
        table: `[R, most tokens]` integer slots by row and position, rows contiguous.
        rows: `[B]` integers.
        indptr: `[B + 1]` integers, from 0.
        out: `[>= indptr[B]]` integers; what lies beyond stays.

    Raises:
        ValueError: shapes do not fit, or Triton cannot run on this device.
    """
    reason = _triton.missing(table.device)
    if reason:
        raise ValueError(f"the slots cannot be packed: {reason}")
    if (
        table.dim() != 2
        or table.stride(1) != 1
        or indptr.numel() != rows.numel() + 1
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"table {tuple(table.shape)}, rows {tuple(rows.shape)} and indptr {tuple(indptr.shape)}"
        )
    if not rows.numel():
        return
    from oscar_kernels.slot_table.kernel import _pack_slots_kernel

    _pack_slots_kernel[(rows.numel(), PROGRAMS)](
        table, rows, indptr, out, table.stride(0), BLOCK=BLOCK, num_warps=4
    )
