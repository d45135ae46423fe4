"""Triton code of `launcher.pack_slots`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["stride_row"], do_not_specialize_on_alignment=["rows_ptr", "indptr_ptr"]
)
def _pack_slots_kernel(
    table_ptr,
    rows_ptr,
    indptr_ptr,
    out_ptr,
    stride_row,
    BLOCK: tl.constexpr,
):
    """Program (b, p) copies every `num_programs(1)`-th block of the row of request b."""
    b = tl.program_id(0)
    row = tl.load(rows_ptr + b).to(tl.int64)
    start = tl.load(indptr_ptr + b).to(tl.int64)
    length = tl.load(indptr_ptr + b + 1).to(tl.int64) - start
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        slots = tl.load(table_ptr + row * stride_row + at, mask=at < length, other=0)
        tl.store(out_ptr + start + at, slots, mask=at < length)
