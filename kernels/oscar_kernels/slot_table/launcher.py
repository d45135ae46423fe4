"""Packing the engine's table of slots into one list, in one Triton launch.

The list is a snapshot, so kernels of a CUDA graph may read it while the engine changes its table.
"""

from __future__ import annotations

from torch import Tensor

from oscar_kernels import _triton

BLOCK = 1024
PROGRAMS = 64
"""Programs per request, so that many programs copy a long one."""


def pack_slots(table: Tensor, rows: Tensor, kv_indptr: Tensor, out: Tensor) -> None:
    """Pack the slots of every request; see `reference.pack_slots`.

    Nothing is read on the host. Bound by memory: 8 bytes per token at int32.

    Args:
        table: rows contiguous.
    """
    reason = _triton.missing(table.device)
    if reason:
        raise ValueError(f"the slots cannot be packed: {reason}")
    if (
        table.dim() != 2
        or table.stride(1) != 1
        or kv_indptr.numel() != rows.numel() + 1
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"table {tuple(table.shape)}, rows {tuple(rows.shape)} and kv_indptr"
            f" {tuple(kv_indptr.shape)}"
        )
    if not rows.numel():
        return
    from oscar_kernels.slot_table.kernel import _pack_slots_kernel

    _pack_slots_kernel[(rows.numel(), PROGRAMS)](
        table, rows, kv_indptr, out, table.stride(0), BLOCK=BLOCK, num_warps=4
    )
