"""The arguments of a launch of `write.cu`: structures, addresses, and the shares of the blocks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.kv_write.arguments import clip_rank
from oscar_kernels.kv_write.cuda.prepared import prepared
from oscar_kernels.kv_write.cuda.variant import STEP_ROWS, TILE, WIDE_TILE
from oscar_kernels.kv_write.reference import Parts
from oscar_kernels.kv_write.tuning import tile_cost


class _Side(ctypes.Structure):
    """`Side` of types.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "halves", "mean", "ring", "sink")),
        *((name, ctypes.c_int) for name in (
            "x_token", "x_head", "out_token", "out_head", "halves_head", "mean_head",
            "blocks", "matrices", "heads", "rows",
        )),
        ("magic", ctypes.c_uint), ("shift", ctypes.c_uint),
    )  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of types.cuh."""

    _fields_ = (
        *((name, _Side) for name in ("v", "k", "q")),
        *((name, ctypes.c_void_p) for name in (
            "codes", "affine", "slots", "request_rows", "positions", "ends", "sink_block",
        )),
        *((name, ctypes.c_int) for name in (
            "tokens", "heads", "recent", "sink", "to_slots", "to_windows", "block_rows",
            "ring_rows",
        )),
    )  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch. The tensors behind its addresses must outlive it.

    Attributes:
        kernel: `oscar_write`, or `oscar_write_slots` if only slots are written, or
            `oscar_write_step` for few rows.
        parameters: the argument of the kernel.
        blocks: blocks of the grid.
    """

    kernel: str
    parameters: Params
    blocks: int

    @property
    def step(self) -> bool:
        """Whether this is the kernel for few rows."""
        return self.kernel == "oscar_write_step"


def arguments(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    windows: WindowState,
    parts: Parts,
    query: Tensor | None,
    query_out: Tensor | None,
    rows_out: tuple[Tensor, Tensor] | None,
    sms: int,
    step: bool | None = None,
) -> Launch:
    """Choose the kernel, its argument and the number of blocks.

    Args:
        sms: multiprocessors of the device; a block takes a whole one.
    """
    k_out, v_out = rows_out or (None, None)
    matrices = prepared(transforms)
    sides = [
        _side(value, v_out, matrices.v, None, cache.num_kv_heads, cache.ring_v, cache.sink_v),
        _side(
            key, k_out, matrices.k, matrices.k_mean, cache.num_kv_heads, cache.ring_k, cache.sink_k
        ),
    ]
    costs = [
        tile_cost(clip_rank(spec), slots=parts != "windows")
        for spec in (cache.v_spec, cache.k_spec)
    ]
    if query is not None and query_out is not None:
        sides.append(_side(query, query_out, matrices.q, None, cache.num_kv_heads, None, None))
        costs.append(tile_cost(0, slots=False))

    def tiles(rows: int) -> tuple[int, ...]:
        return tuple(side.matrices * -(-side.rows // rows) for side in sides)

    wide = max(cache.k_spec.head_dim, cache.v_spec.head_dim) > 128
    most = WIDE_TILE if wide else TILE
    fitting = next((n for n in range(STEP_ROWS, most + 1, STEP_ROWS) if sum(tiles(n)) <= sms), None)
    step = wide or (fitting is not None if step is None else step)
    rows = fitting or most
    given = (
        tiles(rows)
        if step
        else shares(tiles(TILE), tuple(x.matrices for x in sides), tuple(costs), sms)
    )
    for side, blocks in zip(sides, given, strict=True):
        side.blocks = blocks
    tensors = (
        cache.codes,
        cache.affine,
        targets.out_loc,
        targets.rows,
        targets.positions,
        targets.ends,
        windows.sink_block,
    )
    parameters = Params(
        sides[0],
        sides[1],
        sides[2] if len(sides) > 2 else _Side(),
        *(x.data_ptr() for x in tensors),
        len(key),
        cache.num_kv_heads,
        cache.recent,
        cache.sink,
        int(parts != "windows"),
        int(parts != "slots"),
        rows,
        cache.ring_rows,
    )
    slots = parts == "slots" and rows_out is None
    kernel = "oscar_write_step" if step else "oscar_write_slots" if slots else "oscar_write"
    return Launch(kernel, parameters, sum(side.blocks for side in sides))


def _side(
    x: Tensor,
    out: Tensor | None,
    halves: Tensor,
    mean: Tensor | None,
    kv_heads: int,
    ring: Tensor | None,
    sink: Tensor | None,
) -> _Side:
    """One side of a launch, its blocks left open. A matrix or mean of each head makes the heads
    apart."""
    apart = halves.shape[0] > 1 or (mean is not None and mean.shape[0] > 1)
    matrices = kv_heads if apart else 1
    heads = x.shape[1] // matrices
    magic, shift = divider(heads)

    def pointer(y: Tensor | None) -> int | None:
        return None if y is None else y.data_ptr()

    return _Side(
        *map(pointer, (x, out, halves, mean, ring, sink)), x.stride(0), x.stride(1),
        0 if out is None else out.stride(0), 0 if out is None else out.stride(1),
        halves.stride(0) if halves.shape[0] > 1 else 0,
        mean.stride(0) if mean is not None and mean.shape[0] > 1 else 0,
        0, matrices, heads, len(x) * heads, magic, shift,
    )  # fmt: skip


def divider(divisor: int) -> tuple[int, int]:
    """`magic, shift` with `n // divisor == (n * magic >> 32) >> shift` for all n below 2^31; unused
    for 1.

    Source: T. Granlund, P. L. Montgomery, Division by invariant integers using multiplication
    (1994), for 31 bits.
    """
    if divisor == 1:
        return 0, 0
    bits = (divisor - 1).bit_length()
    return -(-(1 << (31 + bits)) // divisor), bits - 1


@lru_cache(maxsize=256)  # the layers of a model ask the same
def shares(
    tiles: tuple[int, ...], matrices: tuple[int, ...], costs: tuple[int, ...], blocks: int
) -> tuple[int, ...]:
    """Blocks of every side, in multiples of `matrices`, given where blocks have most to do until no
    side can take more.

    Args:
        tiles: of a side; it gets no more blocks.
        matrices: of a side; a block has one.
        blocks: to share; more are given where sides have more matrices than that.
    """
    given = [min(n, m) for n, m in zip(tiles, matrices, strict=True)]
    while True:
        spare = blocks - sum(given)
        wanting = [i for i, n in enumerate(tiles) if matrices[i] <= min(spare, n - given[i])]
        if not wanting:
            return tuple(given)
        busiest = max(wanting, key=lambda i: tiles[i] * costs[i] / given[i])
        given[busiest] += matrices[busiest]
