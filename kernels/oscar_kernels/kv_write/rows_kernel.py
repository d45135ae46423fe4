"""Transform new rows: load rows and matrix, multiply, and store rows in channel order.

Column `c` of a tile `[BLOCK_M, 4 * QUARTER]` is channel `c // QUARTER * (D // 4) + c % QUARTER`,
and padding columns are zero.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton joins tuples by addition only)

from __future__ import annotations

import triton
import triton.language as tl


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
