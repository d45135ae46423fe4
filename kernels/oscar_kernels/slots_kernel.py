"""Triton code of `slots`: packing a table, and committing drafts."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit(
    do_not_specialize=["stride_row"],
    do_not_specialize_on_alignment=["rows_ptr", "lengths_ptr", "indptr_ptr", "new_ptr"],
)
def _pack_slots_kernel(
    table_ptr, rows_ptr, lengths_ptr, indptr_ptr, out_ptr, stride_row,
    new_ptr, own_slots_ptr, own_lengths_ptr, positions_ptr,
    LEAST: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, p) copies every `num_programs(1)`-th block of the row of request b."""
    b = tl.program_id(0)
    row = tl.load(rows_ptr + b).to(tl.int64)
    length = tl.maximum(tl.load(lengths_ptr + b), LEAST).to(tl.int64)
    start = tl.zeros([], tl.int64)
    for first in range(0, b, BLOCK):
        at = first + tl.arange(0, BLOCK)
        lengths = tl.maximum(tl.load(lengths_ptr + at, mask=at < b, other=0), LEAST)
        start += tl.sum(tl.where(at < b, lengths, 0).to(tl.int64))
    if tl.program_id(1) == 0:
        if b == 0:
            tl.store(indptr_ptr, 0)
        tl.store(indptr_ptr + b + 1, start + length)
        if new_ptr is not None:
            tl.store(own_slots_ptr + b, tl.maximum(tl.load(new_ptr + b), 0))
            tl.store(own_lengths_ptr + b, length)
            tl.store(positions_ptr + b, length - 1)
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        slots = tl.load(table_ptr + row * stride_row + at // PAGE, mask=at < length, other=0)
        tl.store(out_ptr + start + at, slots * PAGE + at % PAGE, mask=at < length)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["accepted_ptr", "rows_ptr", "lengths_ptr", "slots_ptr"],
)
def _commit_drafts_kernel(
    table_ptr, accepted_ptr, rows_ptr, lengths_ptr, slots_ptr, sink_block_ptr, count,
    RING: tl.constexpr, SINK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (layer, b): the nodes of request b from the first depth on. A node is not less than
    its depth, so what is overwritten was copied before."""
    line = table_ptr + tl.program_id(0) * 10
    b = tl.program_id(1)
    row = tl.load(rows_ptr + b).to(tl.int64)
    length = tl.load(lengths_ptr + b).to(tl.int64)
    block = tl.load(sink_block_ptr + row).to(tl.int64)
    for depth in range(count):
        node = tl.load(accepted_ptr + b * count + depth)
        if node >= 0:
            position = length + depth
            new = row * RING + position % RING
            if node != depth:
                old_slot = tl.load(slots_ptr + b * count + node).to(tl.int64)
                new_slot = tl.load(slots_ptr + b * count + depth).to(tl.int64)
                old = row * RING + (length + node) % RING
                _copy(line, 0, 6, old_slot, 0, new_slot, BLOCK)
                _copy(line, 1, 7, old_slot, 1, new_slot, BLOCK)
                _copy(line, 2, 8, old, 2, new, BLOCK)
                _copy(line, 3, 9, old, 3, new, BLOCK)
                tl.debug_barrier()
            if position < SINK:
                _copy(line, 2, 8, new, 4, block * SINK + position, BLOCK)
                _copy(line, 3, 9, new, 5, block * SINK + position, BLOCK)


@triton.jit
def _copy(
    line, from_at: tl.constexpr, width_at: tl.constexpr, old, to_at: tl.constexpr, new,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, in units of 16 bits, from the store `from_at` of a line of the table to `to_at`."""
    source = tl.load(line + from_at).to(tl.pointer_type(tl.int16))
    target = tl.load(line + to_at).to(tl.pointer_type(tl.int16))
    width = tl.load(line + width_at)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(source + old * width + at, mask=at < width, other=0)
        tl.store(target + new * width + at, x, mask=at < width)
