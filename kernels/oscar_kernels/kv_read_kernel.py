"""Cached tokens to rows: unpack and scale what lies in INT2, copy what lies in a window.

A line is one token and one KV head. A tile holds lines `[BLOCK_M, QUARTER]`, once for each quarter
of the channels: a byte of codes gives one channel to each of four quarters, or of two with codes of
4 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def _request_of(cuts_ptr, place, requests, steps):
    """The request `b` with `cuts[b] <= place < cuts[b + 1]`, by bisection; `requests` past the last
    cut."""
    low = tl.zeros_like(place)
    high = low + requests
    for _step in tl.range(steps):
        middle = (low + high) // 2
        beyond = tl.load(cuts_ptr + tl.minimum(middle, requests - 1) + 1).to(tl.int64) <= place
        low = tl.where(beyond, tl.minimum(middle + 1, requests), low)
        high = tl.where(beyond, high, middle)
    return low


@triton.jit
def _dequantized(codes, shift: tl.constexpr, BITS: tl.constexpr, scale, offset):
    code = (codes >> shift) & ((1 << BITS) - 1)
    return code.to(tl.float32) * scale[:, None] + offset[:, None]


@triton.jit
def _expand_side(
    codes_ptr, affine_ptr, record, affine, out_ptr, out_offset, packed,
    D: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """K or V of the lines that are stored as codes."""
    column = tl.arange(0, QUARTER)
    mask = packed[:, None] & (column < D // 4)[None, :]
    at_codes = codes_ptr + record[:, None] + column[None, :]
    codes = tl.load(at_codes, mask=mask, other=0).to(tl.int32)
    out_ptr += out_offset[:, None] + column[None, :]
    dtype = out_ptr.dtype.element_ty
    scale = tl.load(affine_ptr + affine, mask=packed, other=0.0).to(tl.float32)
    offset = tl.load(affine_ptr + affine + 1, mask=packed, other=0.0).to(tl.float32)
    for quarter in tl.static_range(4):
        if quarter > 0 and quarter * GROUPS % 4 == 0:
            at = affine + 2 * (quarter * GROUPS // 4)
            scale = tl.load(affine_ptr + at, mask=packed, other=0.0).to(tl.float32)
            offset = tl.load(affine_ptr + at + 1, mask=packed, other=0.0).to(tl.float32)
        if BITS == 4 and quarter == 2:
            codes = tl.load(at_codes + D // 4, mask=mask, other=0).to(tl.int32)
        rows = _dequantized(codes, BITS * (quarter % (8 // BITS)), BITS, scale, offset)
        tl.store(out_ptr + quarter * (D // 4), rows.to(dtype), mask=mask)


@triton.jit
def _copy_stored(
    codes_ptr, record, out_ptr, out_offset, packed, D: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """V of such lines where it is a rotary key, whose numbers are stored."""
    column = tl.arange(0, PADDED)
    mask = packed[:, None] & (column < D)[None, :]
    stored = (codes_ptr + record).to(tl.pointer_type(tl.bfloat16))[:, None] + column[None, :]
    rows = tl.load(stored, mask=mask, other=0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset[:, None] + column[None, :], rows, mask=mask)


@triton.jit
def _copy_side(
    ring_ptr, sink_ptr, ring, sink, out_ptr, out_offset, in_ring, in_sink,
    D: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """K or V of the lines in a window."""
    column = tl.arange(0, PADDED)
    real = (column < D)[None, :]
    rows = tl.load(
        ring_ptr + ring[:, None] + column[None, :], mask=in_ring[:, None] & real, other=0.0
    )
    sinks = tl.load(
        sink_ptr + sink[:, None] + column[None, :], mask=in_sink[:, None] & real, other=0.0
    )
    rows = tl.where(in_sink[:, None], sinks, rows).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + out_offset[:, None] + column[None, :],
        rows,
        mask=(in_ring | in_sink)[:, None] & real,
    )


@triton.jit(
    do_not_specialize=["capacity", "requests", "steps"],
    do_not_specialize_on_alignment=["indptr_ptr", "rows_ptr", "first_ptr", "cuts_ptr"],
)
def _materialize_prefix_kernel(
    codes_ptr, affine_ptr, ring_k_ptr, ring_v_ptr, sink_k_ptr, sink_v_ptr, out_k_ptr, out_v_ptr,
    indptr_ptr, slots_ptr, rows_ptr, sink_block_ptr, sink_from_ptr, ring_start_ptr, first_ptr,
    cuts_ptr, capacity, requests, steps,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, QUARTER_K: tl.constexpr,
    QUARTER_V: tl.constexpr, GROUPS_K: tl.constexpr, GROUPS_V: tl.constexpr, BITS_K: tl.constexpr,
    BITS_V: tl.constexpr, RECENT: tl.constexpr, RING: tl.constexpr, SINK: tl.constexpr,
    FIRST: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Lines `BLOCK_M * program ..` of the output, whatever requests they belong to."""
    line = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    place, head = line // HEADS, line % HEADS
    request = _request_of(cuts_ptr, place, requests, steps)
    valid = (place < capacity) & (request < requests)
    request = tl.minimum(request, requests - 1)
    begin = tl.load(indptr_ptr + request).to(tl.int64)
    length = tl.load(indptr_ptr + request + 1).to(tl.int64) - begin
    position = place - tl.load(cuts_ptr + request).to(tl.int64)
    if FIRST:
        position += tl.load(first_ptr + request).to(tl.int64)
    valid &= position < length
    row = tl.load(rows_ptr + request, mask=valid, other=0).to(tl.int64)
    in_sink = valid & (position < SINK) & (position >= tl.load(sink_from_ptr + row))
    in_ring = (
        valid
        & (in_sink == 0)
        & (position >= length - RECENT)
        & (position >= tl.load(ring_start_ptr + row))
    )
    packed = valid & (in_sink == 0) & (in_ring == 0)
    slot = tl.load(slots_ptr + begin + position, mask=packed, other=0).to(tl.int64) * HEADS + head
    record = slot * ((DK * BITS_K + DV * BITS_V) // 8)
    affine = slot * (2 * (GROUPS_K + GROUPS_V))
    _expand_side(
        codes_ptr, affine_ptr, record, affine, out_k_ptr, line * DK, packed, DK, QUARTER_K,
        GROUPS_K, BITS_K,
    )  # fmt: skip
    if BITS_V == 16:
        _copy_stored(
            codes_ptr + DK * BITS_K // 8, record, out_v_ptr, line * DV, packed, DV, 4 * QUARTER_V
        )
    else:
        _expand_side(
            codes_ptr + DK * BITS_K // 8, affine_ptr + 2 * GROUPS_K, record, affine, out_v_ptr,
            line * DV, packed, DV, QUARTER_V, GROUPS_V, BITS_V,
        )  # fmt: skip
    if tl.max((in_sink | in_ring).to(tl.int32), 0) > 0:
        block = tl.load(sink_block_ptr + row).to(tl.int64)
        sink = (block * SINK + position) * HEADS + head
        ring = (row * RING + position % RING) * HEADS + head
        _copy_side(
            ring_k_ptr, sink_k_ptr, ring * DK, sink * DK, out_k_ptr, line * DK, in_ring, in_sink,
            DK, 4 * QUARTER_K,
        )  # fmt: skip
        _copy_side(
            ring_v_ptr, sink_v_ptr, ring * DV, sink * DV, out_v_ptr, line * DV, in_ring, in_sink,
            DV, 4 * QUARTER_V,
        )  # fmt: skip
