"""One order statistic of every row of a tile, exactly: a pruned sorting network, or counting for
deep ranks.

Columns are folded until each is a list of the `KEPT` largest so far, in falling order; two lists
merge into the `KEPT` largest of both. Only minima and maxima are taken, so the result is an element
of the row, whatever it holds.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton joins tuples by addition only)

from __future__ import annotations

import triton
import triton.language as tl


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
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    a6,
    a7,
    a8,
    a9,
    a10,
    a11,
    b0,
    b1,
    b2,
    b3,
    b4,
    b5,
    b6,
    b7,
    b8,
    b9,
    b10,
    b11,
):
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
