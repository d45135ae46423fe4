"""Clip, quantize, pack and store the transformed rows of new tokens.

A tile holds rows `[BLOCK_M, 4 * QUARTER]`: four quarters of the channels, each padded to a power of
two, so that the codes of one byte lie in four equal pieces of the tile, or in two of them with
codes of 4 bits. Padding columns are zero: they are never among the largest magnitudes, and groups
mask them.

Minimum and maximum run at half the rate of other arithmetic, so a value meets as few of them as
possible: the clip limits a group's extremes, not its values, whose codes saturate anyway.

The limit of the clip is one order statistic of a row, exactly: by a pruned sorting network, or by
counting for deep ranks. Columns are folded until each is a list of the `KEPT` largest so far, in
falling order; two lists merge into the `KEPT` largest of both. Only minima and maxima are taken, so
the result is an element of the row, whatever it holds.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton joins tuples by addition only)

from __future__ import annotations

import triton
import triton.language as tl

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
    """Quantize and pack the four quarters of rows; see `oscar_kernels.spec`."""
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
def _carry_on(
    codes_ptr, quarters, lows, highs, inverses, mask, feedback_ptr,
    D: tl.constexpr, QUARTER: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Quantize and pack rows whose channels make up for the errors of those before them, the four
    channels of a byte after those of the byte before; see `quantizer.quantize_codes`."""
    TOP: tl.constexpr = (1 << BITS) - 1
    PER: tl.constexpr = 8 // BITS
    column = tl.arange(0, QUARTER)
    real = column < D // 4
    x0, x1, x2, x3 = quarters
    packed = tl.zeros(x0.shape, tl.int32)
    for byte in tl.range(D // 4):
        here = (column == byte)[None, :]
        word = tl.zeros((x0.shape[0],), tl.int32)
        for q in tl.static_range(4):
            value = x0 if q == 0 else x1 if q == 1 else x2 if q == 2 else x3
            target = tl.sum(tl.where(here, value, 0.0), 1)
            share = tl.minimum(tl.maximum((target - lows[q]) * inverses[q], 0.0), 1.0)
            code = (share * TOP + 0.5).to(tl.int32)
            extent = tl.maximum(highs[q] - lows[q], MIN_RANGE)
            step = tl.div_rn(extent, tl.full(extent.shape, TOP * 1.0, tl.float32))
            rest = (code.to(tl.float32) * step + lows[q] - target)[:, None]
            word += code << (BITS * q)
            row_ptr = feedback_ptr + (4 * byte + q) * D + 4 * column
            x0 += rest * tl.load(row_ptr, mask=real, other=0.0).to(tl.float32)[None, :]
            x1 += rest * tl.load(row_ptr + 1, mask=real, other=0.0).to(tl.float32)[None, :]
            x2 += rest * tl.load(row_ptr + 2, mask=real, other=0.0).to(tl.float32)[None, :]
            x3 += rest * tl.load(row_ptr + 3, mask=real, other=0.0).to(tl.float32)[None, :]
        packed = tl.where(here, word[:, None], packed)
    tl.store(codes_ptr, (packed & 255).to(tl.uint8), mask=mask)
    if PER == 2:
        tl.store(codes_ptr + D // 4, (packed >> 8).to(tl.uint8), mask=mask)


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
    x, codes_ptr, affine_ptr, code_offset, affine_offset, valid, feedback_ptr,
    D: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    RANK: tl.constexpr, LANE_COLUMNS: tl.constexpr, LARGEST: tl.constexpr, PTX: tl.constexpr,
    FEEDBACK: tl.constexpr,
):  # fmt: skip
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
    if FEEDBACK:
        highs = (high0, high1, high2, high3)
        quarters = (x0, x1, x2, x3)
        _carry_on(codes_ptr, quarters, lows, highs, inverses, mask, feedback_ptr, D, QUARTER, BITS)
        return
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


@triton.jit
def _quantize_rows_kernel(
    x_ptr, codes_ptr, affine_ptr, feedback_ptr, tokens, heads,
    D: tl.constexpr, QUARTER: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    RANK: tl.constexpr, LANE_COLUMNS: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid, row = token < tokens, plane * tokens + token
    column = tl.arange(0, 4 * QUARTER)
    channel, real = column // QUARTER * (D // 4) + column % QUARTER, column % QUARTER < D // 4
    mask = valid[:, None] & real[None, :]
    x = tl.load(x_ptr + row[:, None] * D + channel[None, :], mask=mask, other=0.0)
    _store_slot(
        x, codes_ptr, affine_ptr, row * (D * BITS // 8), row * (2 * GROUPS), valid,
        feedback_ptr + plane % heads * D * D,
        D, QUARTER, GROUPS, BITS, RANK, LANE_COLUMNS, LARGEST, False, True,
    )  # fmt: skip


@triton.constexpr_function
def sorting(size: int) -> tuple[int, ...]:
    """Wires of comparators, two by two, larger value to the first: sort `size` values (Batcher's
    odd-even merge).

    `size` is a power of two.
    """
    wires: list[int] = []
    block = 1
    while block < size:
        step = block
        while step:
            for low in range(step % block, size - step, 2 * step):
                for i in range(low, min(low + step, size - step)):
                    if i // (2 * block) == (i + step) // (2 * block):
                        wires += [i, i + step]
            step //= 2
        block *= 2
    return tuple(wires)


@triton.constexpr_function
def merging(size: int) -> tuple[int, ...]:
    """The same for `size` values that fall and then rise; the last `size` entries are the wires in
    falling order.

    A bitonic merge of the next power of two, filled up with infinities at the end, whose
    comparators do nothing.
    """
    places = [i if i < size else -1 for i in range(1 << (size - 1).bit_length())]
    wires: list[int] = []
    step = len(places) // 2
    while step:
        for i in range(len(places)):
            if i & step:
                continue
            if places[i + step] < 0:
                places[i], places[i + step] = -1, places[i]
            elif places[i] >= 0:
                wires += [places[i], places[i + step]]
        step //= 2
    return (*wires, *[wire for wire in places if wire >= 0])


@triton.constexpr_function
def kept(rank, columns):
    """Length of the lists that hold the `rank` largest of so many columns; 0 to count instead."""
    for size in (4, 6, 8, 12, 16):
        if rank <= size and 1 << (size - 1).bit_length() <= columns:
            return size
    return 0


@triton.constexpr_function
def _log2_up(n):
    return (n - 1).bit_length()


@triton.constexpr_function
def _length(wires):
    return len(wires)


@triton.jit
def _halves(x):
    """Left and right half of the columns; in the layout of a matrix product no value leaves its
    thread."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _compared(x, SIZE: tl.constexpr, WIRES: tl.constexpr, COUNT: tl.constexpr):
    """Run the first `COUNT` comparators of a network on a tuple."""
    for index in tl.static_range(COUNT):
        out = ()
        for i in tl.static_range(SIZE):
            if i == WIRES[2 * index]:
                out = out + (tl.maximum(x[i], x[WIRES[2 * index + 1]]),)
            elif i == WIRES[2 * index + 1]:
                out = out + (tl.minimum(x[WIRES[2 * index]], x[i]),)
            else:
                out = out + (x[i],)
        x = out
    return x


@triton.jit
def _merged(a, b, SIZE: tl.constexpr):
    """The `SIZE` largest of two falling lists of that length, falling."""
    WIRES: tl.constexpr = merging(SIZE)
    ORDER: tl.constexpr = _length(WIRES) - SIZE
    out = ()
    for i in tl.static_range(SIZE):
        out = out + (tl.maximum(a[i], b[SIZE - 1 - i]),)
    x = _compared(out, SIZE, WIRES, ORDER // 2)
    out = ()
    for i in tl.static_range(SIZE):
        out = out + (x[WIRES[ORDER + i]],)
    return out


@triton.jit
def _merged_4(a0, a1, a2, a3, b0, b1, b2, b3):
    return _merged((a0, a1, a2, a3), (b0, b1, b2, b3), 4)


@triton.jit
def _merged_6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return _merged((a0, a1, a2, a3, a4, a5), (b0, b1, b2, b3, b4, b5), 6)


@triton.jit
def _merged_8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return _merged((a0, a1, a2, a3, a4, a5, a6, a7), (b0, b1, b2, b3, b4, b5, b6, b7), 8)


@triton.jit
def _merged_12(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10,
    b11,
):  # fmt: skip
    a = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11)
    return _merged(a, (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11), 12)


@triton.jit
def _merged_16(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15,
):  # fmt: skip
    a = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15)
    b = (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15)
    return _merged(a, b, 16)


@triton.jit
def _folded(lists):
    """Left and right half of the columns of every tensor of a tuple."""
    left = ()
    right = ()
    for i in tl.static_range(len(lists)):
        a, b = _halves(lists[i])
        left = left + (a,)
        right = right + (b,)
    return left, right


@triton.jit
def _by_network(x, RANK: tl.constexpr, KEPT: tl.constexpr, LANE_COLUMNS: tl.constexpr):
    """The `RANK`-th largest; columns fold inside a thread down to `LANE_COLUMNS`, then threads
    exchange their lists."""
    LOG: tl.constexpr = _log2_up(KEPT)
    lists = (x,)
    for _level in tl.static_range(LOG):
        left, right = _folded(lists)
        lists = left + right
    WIRES: tl.constexpr = sorting(2**LOG)
    sorted_lists = _compared(lists, 2**LOG, WIRES, _length(WIRES) // 2)
    lists = ()
    for i in tl.static_range(KEPT):
        lists = lists + (sorted_lists[i],)
    for _level in tl.static_range(8):
        if x.shape[1] // 2 ** (LOG + _level) > LANE_COLUMNS:
            left, right = _folded(lists)
            lists = _merged(left, right, KEPT)
    if LANE_COLUMNS > 1:
        if KEPT == 4:
            lists = tl.reduce(lists, 1, _merged_4)
        elif KEPT == 6:
            lists = tl.reduce(lists, 1, _merged_6)
        elif KEPT == 8:
            lists = tl.reduce(lists, 1, _merged_8)
        elif KEPT == 12:
            lists = tl.reduce(lists, 1, _merged_12)
        else:
            lists = tl.reduce(lists, 1, _merged_16)
        return lists[RANK - 1]
    return tl.reshape(lists[RANK - 1], (x.shape[0],))


@triton.jit
def _by_counting(x, RANK: tl.constexpr):
    """The `RANK`-th largest: the largest bit pattern that `RANK` of them reach.

    Patterns of non-negative floats are ordered as the floats are, so 31 counts find it exactly.
    """
    bits = x.to(tl.int32, bitcast=True)
    found = tl.zeros((x.shape[0],), tl.int32)
    for step in tl.range(31):
        candidate = found | (1 << (30 - step))
        count = tl.sum((bits >= candidate[:, None]).to(tl.int32), 1)
        found = tl.where(count >= RANK, candidate, found)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _ranked_magnitude(x, RANK: tl.constexpr, LANE_COLUMNS: tl.constexpr):
    """The `RANK`-th largest absolute value of each row of `[BLOCK_M, columns]`; infinity for rank
    0."""
    if RANK == 0:
        return tl.full((x.shape[0],), float("inf"), tl.float32)
    KEPT: tl.constexpr = kept(RANK, x.shape[1])
    if KEPT > 0:
        return _by_network(tl.abs(x), RANK, KEPT, LANE_COLUMNS)
    return _by_counting(tl.abs(x), RANK)
