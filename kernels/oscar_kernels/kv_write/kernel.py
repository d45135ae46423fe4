"""Transform, clip, quantize, pack and store new tokens. A program takes one head of K, V or query,
some of its blocks.

Column `c` of a tile `[BLOCK_M, 4 * QUARTER]` is channel `c // QUARTER * (D // 4) + c % QUARTER`,
and padding columns are zero. `slot_kernel` clips, quantizes and packs a tile.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton joins tuples by addition only)

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels.kv_write.slot_kernel import _any, _store_slot


@triton.jit
def _write_side(
    x_ptr, out_ptr, stride_t, stride_h, matrix_ptr, mean_ptr, stride_matrix, stride_mean, codes_ptr,
    affine_ptr, stride_code, stride_affine, ring_ptr, sink_ptr, slots_ptr, rows_ptr, positions_ptr,
    ends_ptr, sink_block_ptr, feedback_ptr, tokens, head, program, programs,
    HEADS: tl.constexpr, D: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr,
    BITS: tl.constexpr, RANK: tl.constexpr, LANE_COLUMNS: tl.constexpr, RECENT: tl.constexpr,
    RING: tl.constexpr, SINK: tl.constexpr, LARGEST: tl.constexpr, PTX: tl.constexpr,
    MEAN: tl.constexpr, SLOTS: tl.constexpr, WINDOWS: tl.constexpr, ROWS_OUT: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """K or V of one head: blocks `program, program + programs, ...` of its tokens."""
    dtype = x_ptr.dtype.element_ty
    matrix_ptr += head * stride_matrix
    parts = _parts(_load_matrix(matrix_ptr, 0, D, QUARTER, BLOCK_K), dtype, PARTS)
    bias = tl.zeros((4 * QUARTER,), tl.float32)
    if MEAN:
        mean_ptr += head * stride_mean
        bias = _mean_product(mean_ptr, 0, parts, D)
        for start in tl.range(BLOCK_K, 4 * QUARTER, BLOCK_K):
            part = _parts(_load_matrix(matrix_ptr, start, D, QUARTER, BLOCK_K), dtype, PARTS)
            bias += _mean_product(mean_ptr, start, part, D)
    for block in tl.range(program, tl.cdiv(tokens, BLOCK_M), programs, num_stages=STAGES):
        token = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        valid = token < tokens
        busy = True
        if WINDOWS:
            row = tl.load(rows_ptr + token, mask=valid, other=0).to(tl.int64)
            position = tl.load(positions_ptr + token, mask=valid, other=0).to(tl.int64)
            end = tl.load(ends_ptr + token, mask=valid, other=0).to(tl.int64)
            last, first = valid & (position >= end - RECENT), valid & (position < SINK)
            if not SLOTS and not ROWS_OUT:
                busy = _any(last | first)
        if busy:
            acc = _transformed(
                x_ptr, token * stride_t + head * stride_h, valid, matrix_ptr, parts,
                D, QUARTER, PARTS, PRECISION, BLOCK_M, BLOCK_K,
            )  # fmt: skip
            if MEAN:
                acc -= bias[None, :]
            if ROWS_OUT:
                _store_rows(out_ptr, (token * HEADS + head) * D, acc, valid, D)
            if WINDOWS:
                if RECENT > 0 and _any(last):
                    offset = (row * RING + position % RING) * HEADS + head
                    _store_rows(ring_ptr, offset * D, acc, last, D)
                if SINK > 0 and _any(first):
                    sink = tl.load(sink_block_ptr + row, mask=first, other=0).to(tl.int64)
                    _store_rows(
                        sink_ptr, ((sink * SINK + position) * HEADS + head) * D, acc, first, D
                    )
            if SLOTS:
                slot = tl.load(slots_ptr + token, mask=valid, other=0).to(tl.int64) * HEADS + head
                _store_slot(
                    acc, codes_ptr, affine_ptr, slot * stride_code, slot * stride_affine, valid,
                    feedback_ptr + head * D * D,
                    D, QUARTER, GROUPS, BITS, RANK, LANE_COLUMNS, LARGEST, PTX, FEEDBACK,
                )  # fmt: skip


@triton.jit
def _copy_rotary(
    x_ptr, out_ptr, stride_t, codes_ptr, stride_code, ring_ptr, sink_ptr, slots_ptr, rows_ptr,
    positions_ptr, ends_ptr, sink_block_ptr, tokens, program, programs,
    D: tl.constexpr, PADDED: tl.constexpr, RECENT: tl.constexpr, RING: tl.constexpr,
    SINK: tl.constexpr, SLOTS: tl.constexpr, WINDOWS: tl.constexpr, ROWS_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rotary keys beside latents, as they are; blocks as of `_write_side`."""
    column = tl.arange(0, PADDED)
    for block in tl.range(program, tl.cdiv(tokens, BLOCK_M), programs):
        token = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (token < tokens)[:, None] & (column < D)[None, :]
        x = tl.load(x_ptr + (token * stride_t)[:, None] + column[None, :], mask=mask, other=0.0)
        if ROWS_OUT:
            to = out_ptr + (token * D)[:, None] + column[None, :]
            tl.store(to, x.to(out_ptr.dtype.element_ty), mask=mask)
        if WINDOWS:
            row = tl.load(rows_ptr + token, mask=token < tokens, other=0).to(tl.int64)
            position = tl.load(positions_ptr + token, mask=token < tokens, other=0).to(tl.int64)
            end = tl.load(ends_ptr + token, mask=token < tokens, other=0).to(tl.int64)
            kept = x.to(ring_ptr.dtype.element_ty)
            if RECENT > 0:
                ring = ring_ptr + ((row * RING + position % RING) * D)[:, None] + column[None, :]
                tl.store(ring, kept, mask=mask & (position >= end - RECENT)[:, None])
            if SINK > 0:
                first = (token < tokens) & (position < SINK)
                sink = tl.load(sink_block_ptr + row, mask=first, other=0).to(tl.int64)
                sinks = sink_ptr + ((sink * SINK + position) * D)[:, None] + column[None, :]
                tl.store(sinks, kept, mask=mask & first[:, None])
        if SLOTS:
            slot = tl.load(slots_ptr + token, mask=token < tokens, other=0).to(tl.int64)
            record = (codes_ptr + slot * stride_code).to(tl.pointer_type(tl.bfloat16))
            tl.store(record[:, None] + column[None, :], x.to(tl.bfloat16), mask=mask)


@triton.jit
def _write_query(
    x_ptr, out_ptr, stride_t, stride_h, stride_out_t, stride_out_h, matrix_ptr, stride_matrix,
    tokens, head, program, programs,
    GROUP: tl.constexpr, D: tl.constexpr, QUARTER: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head; a tile row is one token and one of its `GROUP` heads."""
    matrix_ptr += head * stride_matrix
    parts = _parts(_load_matrix(matrix_ptr, 0, D, QUARTER, BLOCK_K), x_ptr.dtype.element_ty, PARTS)
    for block in tl.range(program, tl.cdiv(tokens * GROUP, BLOCK_M), programs, num_stages=STAGES):
        line = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        token, query_head = line // GROUP, head * GROUP + line % GROUP
        valid = token < tokens
        acc = _transformed(
            x_ptr, token * stride_t + query_head * stride_h, valid, matrix_ptr, parts,
            D, QUARTER, PARTS, PRECISION, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        _store_rows(out_ptr, token * stride_out_t + query_head * stride_out_h, acc, valid, D)


@triton.jit(
    do_not_specialize=["tokens", "kv_programs", "query_programs"],
    do_not_specialize_on_alignment=["slots_ptr", "rows_ptr", "positions_ptr", "ends_ptr"],
)
def _write_kv_int2_kernel(
    key_ptr, value_ptr, query_ptr, query_out_ptr, key_out_ptr, value_out_ptr, codes_ptr, affine_ptr,
    ring_k_ptr, ring_v_ptr, sink_k_ptr, sink_v_ptr, k_forward_ptr, v_forward_ptr, q_partner_ptr,
    k_mean_ptr, feedback_ptr, slots_ptr, rows_ptr, positions_ptr, ends_ptr, sink_block_ptr, tokens,
    kv_programs, query_programs, stride_key_t, stride_key_h, stride_value_t, stride_value_h,
    stride_query_t, stride_query_h, stride_query_out_t, stride_query_out_h, stride_k_forward,
    stride_v_forward, stride_q_partner, stride_k_mean,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    QUARTER_K: tl.constexpr, QUARTER_V: tl.constexpr, GROUPS_K: tl.constexpr,
    GROUPS_V: tl.constexpr, BITS_K: tl.constexpr, BITS_V: tl.constexpr, RANK_K: tl.constexpr,
    RANK_V: tl.constexpr, PTX: tl.constexpr, LANE_COLUMNS: tl.constexpr, RECENT: tl.constexpr,
    RING: tl.constexpr, SINK: tl.constexpr, LARGEST: tl.constexpr, MEAN: tl.constexpr,
    SLOTS: tl.constexpr, WINDOWS: tl.constexpr, ROWS_OUT: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K_K: tl.constexpr,
    BLOCK_K_V: tl.constexpr, STAGES: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Programs of V, then of K, then of the query; heads lie side by side, so that neighbours read
    the same tokens."""
    RECORD: tl.constexpr = (DK * BITS_K + DV * BITS_V) // 8
    AFFINE: tl.constexpr = 2 * (GROUPS_K + GROUPS_V)
    head = tl.program_id(0) % HEADS
    program = tl.program_id(0) // HEADS
    if program < kv_programs:
        if BITS_V == 16:
            _copy_rotary(
                value_ptr, value_out_ptr, stride_value_t, codes_ptr + DK * BITS_K // 8, RECORD,
                ring_v_ptr, sink_v_ptr, slots_ptr, rows_ptr, positions_ptr, ends_ptr,
                sink_block_ptr, tokens, program, kv_programs, DV, 4 * QUARTER_V, RECENT, RING,
                SINK, SLOTS, WINDOWS, ROWS_OUT, BLOCK_M,
            )  # fmt: skip
        else:
            _write_side(
                value_ptr, value_out_ptr, stride_value_t, stride_value_h, v_forward_ptr,
                v_forward_ptr, stride_v_forward, 0, codes_ptr + DK * BITS_K // 8,
                affine_ptr + 2 * GROUPS_K, RECORD, AFFINE,
                ring_v_ptr, sink_v_ptr, slots_ptr, rows_ptr, positions_ptr, ends_ptr,
                sink_block_ptr, feedback_ptr, tokens, head, program, kv_programs,
                HEADS, DV, QUARTER_V, GROUPS_V, BITS_V, RANK_V, LANE_COLUMNS, RECENT, RING, SINK,
                LARGEST, PTX, False, SLOTS, WINDOWS, ROWS_OUT, PARTS, PRECISION, BLOCK_M,
                BLOCK_K_V, STAGES, False,
            )  # fmt: skip
    elif program < 2 * kv_programs:
        _write_side(
            key_ptr, key_out_ptr, stride_key_t, stride_key_h, k_forward_ptr, k_mean_ptr,
            stride_k_forward, stride_k_mean, codes_ptr, affine_ptr, RECORD, AFFINE,
            ring_k_ptr, sink_k_ptr, slots_ptr, rows_ptr, positions_ptr, ends_ptr, sink_block_ptr,
            feedback_ptr, tokens, head, program - kv_programs, kv_programs,
            HEADS, DK, QUARTER_K, GROUPS_K, BITS_K, RANK_K, LANE_COLUMNS, RECENT, RING, SINK,
            LARGEST, PTX, MEAN, SLOTS, WINDOWS, ROWS_OUT, PARTS, PRECISION, BLOCK_M, BLOCK_K_K,
            STAGES, FEEDBACK,
        )  # fmt: skip
    else:
        if GROUP > 0:
            _write_query(
                query_ptr, query_out_ptr, stride_query_t, stride_query_h, stride_query_out_t,
                stride_query_out_h, q_partner_ptr, stride_q_partner, tokens, head,
                program - 2 * kv_programs, query_programs, GROUP, DK, QUARTER_K, PARTS, PRECISION,
                BLOCK_M, BLOCK_K_K, STAGES,
            )  # fmt: skip


@triton.jit
def _load_matrix(matrix_ptr, first, D: tl.constexpr, QUARTER: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows `first ..` of a matrix, columns in the order of a tile: `[BLOCK_K, 4 * QUARTER]`
    float32."""
    row = first + tl.arange(0, BLOCK_K)
    column = tl.arange(0, 4 * QUARTER)
    channel = column // QUARTER * (D // 4) + column % QUARTER
    mask = (row < D)[:, None] & (column % QUARTER < D // 4)[None, :]
    return tl.load(matrix_ptr + row[:, None] * D + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _parts(matrix, dtype: tl.constexpr, PARTS: tl.constexpr):
    """A float32 matrix as a sum of 16-bit ones, largest first; itself for no parts."""
    out = ()
    if PARTS == 0:
        out = (matrix,)
    for index in tl.static_range(PARTS):
        part = matrix.to(dtype)
        if (
            index < PARTS - 1 and dtype == tl.bfloat16
        ):  # cutting is exact and cheap where the rest follows
            part = (
                (matrix.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            )
        matrix -= part.to(tl.float32)
        out = out + (part,)
    return out


@triton.jit
def _product(x, parts, acc, PRECISION: tl.constexpr):
    """`acc + x @ sum(parts)`, smallest part first."""
    for i in tl.static_range(len(parts)):
        acc = tl.dot(x, parts[len(parts) - 1 - i], acc, input_precision=PRECISION)
    return acc


@triton.jit
def _mean_product(mean_ptr, first, parts, D: tl.constexpr):
    """`mean @ sum(parts)`, float32: what centring takes from every row."""
    row = first + tl.arange(0, parts[0].shape[0])
    mean = tl.load(mean_ptr + row, mask=row < D, other=0.0)[:, None]
    total = parts[0].to(tl.float32)
    for i in tl.static_range(1, len(parts)):
        total += parts[i].to(tl.float32)
    return tl.sum(mean * total, 0)


@triton.jit
def _load_rows(x_ptr, offset, valid, first, D: tl.constexpr, BLOCK_K: tl.constexpr):
    column = first + tl.arange(0, BLOCK_K)
    mask = valid[:, None] & (column < D)[None, :]
    return tl.load(x_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(out_ptr, offset, x, valid, D: tl.constexpr):
    QUARTER: tl.constexpr = x.shape[1] // 4
    column = tl.arange(0, 4 * QUARTER)
    channel = column // QUARTER * (D // 4) + column % QUARTER
    mask = valid[:, None] & (column % QUARTER < D // 4)[None, :]
    tl.store(
        out_ptr + offset[:, None] + channel[None, :], x.to(out_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def _transformed(
    x_ptr, offset, valid, matrix_ptr, parts,
    D: tl.constexpr, QUARTER: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of rows times the matrix, whose first `BLOCK_K` rows are `parts`; the others are read
    again."""
    x = _load_rows(x_ptr, offset, valid, 0, D, BLOCK_K)
    acc = _product(x, parts, tl.zeros((BLOCK_M, 4 * QUARTER), tl.float32), PRECISION)
    for first in tl.range(BLOCK_K, 4 * QUARTER, BLOCK_K):
        x = _load_rows(x_ptr, offset, valid, first, D, BLOCK_K)
        part = _parts(
            _load_matrix(matrix_ptr, first, D, QUARTER, BLOCK_K), x_ptr.dtype.element_ty, PARTS
        )
        acc = _product(x, part, acc, PRECISION)
    return acc
