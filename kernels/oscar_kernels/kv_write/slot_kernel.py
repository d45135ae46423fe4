"""Clip, quantize, pack and store the transformed rows of new tokens.

A tile holds rows `[BLOCK_M, 4 * QUARTER]`: four quarters of the channels, each padded to a power of
two, so that the codes of one byte lie in four equal pieces of the tile, or in two of them with
codes of 4 bits. Padding columns are zero:
they are never among the largest magnitudes, and groups mask them.

Minimum and maximum run at half the rate of other arithmetic, so a value meets as few of them as
possible: the clip limits a group's extremes, not its values, whose codes saturate anyway.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels.kv_write.order_kernel import _halves, _ranked_magnitude
from oscar_kernels.spec import MIN_RANGE as _MIN_RANGE

MIN_RANGE = tl.constexpr(_MIN_RANGE)


@triton.jit
def _any(mask):
    return tl.max(mask.to(tl.int32), 0) > 0


@triton.jit
def _clamp(x, limit):
    return tl.minimum(tl.maximum(x, -limit[:, None]), limit[:, None])


@triton.jit
def _codes(x, low, inverse, BITS: tl.constexpr, PTX: tl.constexpr):
    """Codes in the low byte of an integer, `floor(top * clamp((x - low) / range, 0, 1) + 0.5)`
    with the largest code `top`, 3 or 15; 0 for NaN."""
    shifted = x - low[:, None]
    if PTX:
        code = _saturated(shifted, inverse, TIMES_3 if BITS == 2 else TIMES_15)
    else:
        share = tl.minimum(tl.maximum(shifted * inverse[:, None], 0.0), 1.0)
        code = (share * ((1 << BITS) - 1) + 0.5).to(tl.int32)
    return code


TIMES_3 = tl.constexpr("""
{
.reg .f32 t;
mul.rn.sat.f32 t, $1, $2;
fma.rn.f32 t, t, 0f40400000, 0f3F000000;
add.rm.f32 $0, t, 0f4B000000;
}
""")
TIMES_15 = tl.constexpr(TIMES_3.value.replace("0f40400000", "0f41700000"))


@triton.jit
def _saturated(shifted, inverse, ASM: tl.constexpr):
    """Saturation is free, and adding 2**23 downwards leaves the floor in the last bits."""
    return tl.inline_asm_elementwise(
        ASM,
        "=r,f,f",
        [shifted, tl.broadcast_to(inverse[:, None], shifted.shape)],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _store_codes(
    codes_ptr, quarters, lows, inverses, mask,
    D: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Quantize and pack the four quarters of rows; see `oscar_kernels.layout`."""
    PER: tl.constexpr = 8 // BITS
    packed = _codes(quarters[0], lows[0], inverses[0], BITS, PTX)
    for i in tl.static_range(1, 4):
        code = _codes(quarters[i], lows[i], inverses[i], BITS, PTX)
        if i == PER:
            tl.store(codes_ptr, packed.to(tl.uint8), mask=mask)
            codes_ptr += D // 4
            packed = code
        else:
            packed += code * (1 << (BITS * (i % PER)))
    tl.store(codes_ptr, packed.to(tl.uint8), mask=mask)


@triton.jit
def _store_affine(affine_ptr, offset, low, high, valid, BITS: tl.constexpr, LARGEST: tl.constexpr):
    """Store scale and offset of one group, saturated; returns `1 / range`."""
    extent = tl.maximum(high - low, MIN_RANGE)
    scale = tl.div_rn(extent, tl.full(extent.shape, (1 << BITS) - 1.0, tl.float32))
    dtype = affine_ptr.dtype.element_ty
    tl.store(affine_ptr + offset, tl.minimum(scale, LARGEST).to(dtype), mask=valid)
    tl.store(
        affine_ptr + offset + 1,
        tl.minimum(tl.maximum(low, -LARGEST), LARGEST).to(dtype),
        mask=valid,
    )
    return tl.div_rn(tl.full(extent.shape, 1.0, tl.float32), extent)


@triton.jit
def _extremes(x, limit, D: tl.constexpr, QUARTER: tl.constexpr, RANK: tl.constexpr):
    """Smallest and largest of a quarter of clipped rows."""
    low, high = x, x
    if D // 4 < QUARTER:
        real = (tl.arange(0, QUARTER) < D // 4)[None, :]
        low, high = tl.where(real, x, float("inf")), tl.where(real, x, float("-inf"))
    low, high = tl.min(low, 1), tl.max(high, 1)
    if RANK > 0:
        low, high = (
            tl.minimum(tl.maximum(low, -limit), limit),
            tl.maximum(tl.minimum(high, limit), -limit),
        )
    return low, high


@triton.jit
def _store_slot(
    x,
    codes_ptr,
    affine_ptr,
    code_offset,
    affine_offset,
    valid,
    D: tl.constexpr,
    QUARTER: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    RANK: tl.constexpr,
    LANE_COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    PTX: tl.constexpr,
):
    """Clip and quantize rows `[BLOCK_M, 4 * QUARTER]`, and store record and affine parameters."""
    limit = _ranked_magnitude(x, RANK, LANE_COLUMNS)
    left, right = _halves(x)
    x0, x1 = _halves(left)
    x2, x3 = _halves(right)
    low0, high0 = _extremes(x0, limit, D, QUARTER, RANK)
    low1, high1 = _extremes(x1, limit, D, QUARTER, RANK)
    low2, high2 = _extremes(x2, limit, D, QUARTER, RANK)
    low3, high3 = _extremes(x3, limit, D, QUARTER, RANK)
    if GROUPS <= 2:
        low0, high0 = tl.minimum(low0, low1), tl.maximum(high0, high1)
        low2, high2 = tl.minimum(low2, low3), tl.maximum(high2, high3)
        low1, high1, low3, high3 = low0, high0, low2, high2
    if GROUPS == 1:
        low0, high0 = tl.minimum(low0, low2), tl.maximum(high0, high2)
        low1, high1, low2, high2, low3, high3 = low0, high0, low0, high0, low0, high0
    inverse0 = _store_affine(affine_ptr, affine_offset, low0, high0, valid, BITS, LARGEST)
    inverse1, inverse2, inverse3 = inverse0, inverse0, inverse0
    if GROUPS == 2:
        inverse2 = _store_affine(affine_ptr, affine_offset + 2, low2, high2, valid, BITS, LARGEST)
        inverse3 = inverse2
    elif GROUPS == 4:
        inverse1 = _store_affine(affine_ptr, affine_offset + 2, low1, high1, valid, BITS, LARGEST)
        inverse2 = _store_affine(affine_ptr, affine_offset + 4, low2, high2, valid, BITS, LARGEST)
        inverse3 = _store_affine(affine_ptr, affine_offset + 6, low3, high3, valid, BITS, LARGEST)
    column = tl.arange(0, QUARTER)
    mask = valid[:, None] & (column < D // 4)[None, :]
    codes_ptr += code_offset[:, None] + column[None, :]
    lows, inverses = (low0, low1, low2, low3), (inverse0, inverse1, inverse2, inverse3)
    _store_codes(codes_ptr, (x0, x1, x2, x3), lows, inverses, mask, D, BITS, PTX)
    if RANK > 0:
        # Codes of values beyond the limit have saturated, except in groups narrower than the
        # smallest range.
        extent = tl.minimum(
            tl.minimum(high0 - low0, high1 - low1), tl.minimum(high2 - low2, high3 - low3)
        )
        if _any(valid & (extent < MIN_RANGE)):
            kept = (_clamp(x0, limit), _clamp(x1, limit), _clamp(x2, limit), _clamp(x3, limit))
            _store_codes(codes_ptr, kept, lows, inverses, mask, D, BITS, PTX)
