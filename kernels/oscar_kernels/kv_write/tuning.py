"""Tiles of the write kernels: plain tables. Measured on one H200."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WriteTiles:
    """How one launch is cut.

    Attributes:
        block_m: tokens of a tile.
        block_k: rows of the matrix that are multiplied at a time; with `head_dim` rows the whole
            matrix stays on the chip.
        parts: number of 16-bit matrices whose sum replaces a float32 matrix; 0 keeps float32.
        warps, stages: of a program.
        programs: most programs for the tokens of one head of K or V.
    """

    block_m: int
    block_k: int
    parts: int
    warps: int
    stages: int
    programs: int


def write_tiles(padded_dim: int, *, sixteen_bit: bool, interpreted: bool) -> WriteTiles:
    """Tiles for rows of `padded_dim` channels, the larger of K's and V's.

    They do not depend on the number of tokens: prefill and decode must sum in the same order, or a
    value on a rounding tie gets different codes. Two parts of a matrix change 3 codes in a million,
    one part changes 1 in a thousand, and three parts change none; 8,192 tokens take 41, 37 and 58
    microseconds with them. Larger tiles, and fewer registers for more warps, gain nothing.

    Args:
        sixteen_bit: new tokens are bfloat16 or float16, exact operands of the tensor cores.
    """
    if interpreted:
        return WriteTiles(block_m=16, block_k=16, parts=0, warps=4, stages=1, programs=2)
    if padded_dim > 256:
        # Four times the matrix of 128 channels, and half the tokens: compiled for compute
        # capability 9 it needs as many registers as one of 256, and less shared memory. Not
        # measured.
        parts = 2 if sixteen_bit else 0
        return WriteTiles(block_m=32, block_k=32, parts=parts, warps=8, stages=1, programs=128)
    if not sixteen_bit:
        return WriteTiles(block_m=64, block_k=32, parts=0, warps=4, stages=1, programs=64)
    if padded_dim > 128:
        return WriteTiles(block_m=64, block_k=64, parts=2, warps=8, stages=1, programs=64)
    return WriteTiles(block_m=64, block_k=128, parts=2, warps=4, stages=2, programs=32)


WARPGROUPS = 3
"""Warpgroups of a block of the CUDA kernel. Up to 4 fit a multiprocessor; four of them leave 128
registers per thread.

8,192 tokens take 44, 30, 28 and 29 microseconds with 1 to 4
(`benchmarks/run.py --variants --only write`).
"""


def tile_cost(rank: int, *, slots: bool) -> int:
    """Clock cycles of a tile of the CUDA kernel, counted in the machine code, not measured.

    A product and the work after it hardly overlap, see kernels/measurements.md. Rows of a query
    cost 1,350, rows with codes but without a clip 1,830, and clips of rank 6 and 11 make it 2,720
    and 3,020.

    Args:
        rank: rank of the clip; 0 for none.
        slots: whether the rows are quantized.
    """
    clip = 530 + 60 * rank if rank else 0
    return 1350 + (480 + clip if slots else 0)
