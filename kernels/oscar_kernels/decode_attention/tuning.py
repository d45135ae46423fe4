"""Tiles and split counts of split-KV attention.

This is a plain table, measured on a GPU ("Tables of tiles" in kernels/measurements.md). It never
looks at lengths, which are on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionTiles:
    """How stage 1 is cut.

    Attributes:
        splits: programs that share the INT2 tokens of a request.
        exact_splits: programs that share the windows of a request.
        block_n: INT2 tokens that a program reads per step.
        exact_block_n: window tokens that a program reads per step.
        rows: query rows of a program: the query heads of a KV head, times `tokens`, padded.
        tokens: query tokens of a program; 0 for decode.
        num_warps, stages: of a program of stage 1.
    """

    splits: int
    exact_splits: int
    block_n: int
    exact_block_n: int
    rows: int
    tokens: int
    num_warps: int
    stages: int

    @property
    def partials(self) -> int:
        """Partial results of a query row, one per program that reads tokens for it."""
        return self.splits + self.exact_splits + (self.tokens > 0)


PROGRAMS_PER_SM = 12
"""Programs of one warp that the registers of a multiprocessor hold, so one wave of them."""

WIDE_PROGRAMS_PER_SM = 4
"""The same for rows of more than 128 channels, whose partial results take twice the memory to write
and to merge."""

LEAST_PROGRAMS = 8
"""Fewest programs of a request and KV head. With fewer, the program of the windows ends last."""

MOST_SPLITS = 512

MERGE = {16: (16, 128, 2), 64: (64, 32, 4), 1024: (256, 32, 4)}
"""Largest number of splits, mapped to splits per step, channels per program, and warps."""
MERGE_WIDE = (16, 64, 1)
"""The same for rows of 512 channels and up to 16 splits; the fastest of twelve on an H200."""


def decode_tiles(
    *, batch: int, num_kv_heads: int, group: int, head_dim: int, exact: int, sms: int
) -> AttentionTiles:
    """Tiles of a decode step.

    Args:
        sms: multiprocessors of the device.
    """
    rows = 8 if group <= 8 else 16
    warps = _warps(rows, head_dim)
    programs = max(LEAST_PROGRAMS, round(sms * _per_sm(head_dim, warps) / (batch * num_kv_heads)))
    exact_splits = min(max(1, programs // 8), -(-exact // 64))
    return AttentionTiles(
        splits=min(programs - exact_splits, MOST_SPLITS),
        exact_splits=exact_splits,
        block_n=32 if rows * head_dim > 2048 else 64,
        exact_block_n=16,
        rows=rows,
        tokens=0,
        num_warps=warps,
        stages=5,
    )


WIDEST = 256
"""Channels up to which one warp holds the outputs of all query rows of a program. Tiles of wider
heads are not measured; compiled for compute capability 9 their values stay in registers."""
WARPS_PER_SM = 8
"""Warps of such programs that the registers of a multiprocessor hold."""


def _warps(rows: int, head_dim: int) -> int:
    """Warps of a program of stage 1, so that a thread holds 64 numbers of wide outputs."""
    return 1 if head_dim <= WIDEST else rows // 4


def _per_sm(head_dim: int, warps: int) -> int:
    """Programs of a decode step that the registers of a multiprocessor hold."""
    if head_dim > WIDEST:
        return max(1, WARPS_PER_SM // warps)
    return PROGRAMS_PER_SM if head_dim <= 128 else WIDE_PROGRAMS_PER_SM


FUSED_TOKENS = 96
"""New tokens of a request up to which an extend reads its INT2 prefix directly. This takes longer
with every new token."""

FUSED_TOKENS_OF_A_STEP = 256
"""New tokens of a step up to which its extends may read INT2 prefixes directly. More would need a
larger workspace."""


def extend_tiles(
    *,
    tokens: int,
    requests: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    exact: int,
    sms: int,
) -> AttentionTiles:
    """Tiles of a short extend of `requests` with `tokens` new tokens in all."""
    each = 16 // group
    blocks = -(-tokens // each) + requests
    programs = max(1, round(sms * 32 / (blocks * num_kv_heads)))
    return AttentionTiles(
        splits=min(programs, MOST_SPLITS),
        exact_splits=1 if exact else 0,
        block_n=64 if head_dim <= 128 else 32,
        exact_block_n=16,
        rows=16,
        tokens=each,
        num_warps=_warps(16, head_dim),
        stages=5,
    )


@dataclass(frozen=True)
class CudaTiles:
    """How the CUDA kernel runs; every field is a flag of decode.cu, see there.

    Attributes:
        stages: stages of the ring of tiles; fewer if the shared memory of a multiprocessor is too
            small.
        resident: most blocks of a multiprocessor, up to `MOST_RESIDENT`.
        window_cost: halves of an INT2 tile that take as long as one step of window tokens, which
            has 3.6 times the bytes of a tile; 0 for those of the shape.
        start: halves of an INT2 tile that take as long as the beginning of a segment.
    """

    stages: int = 6
    resident: int = 1
    window_cost: int = 0
    start: int = 10


def window_cost(head_dim: int, rows: int) -> int:
    """`CudaTiles.window_cost` of a warp with so many query rows. The more there are, the more of
    the time of a tile is arithmetic."""
    if head_dim != WHOLE_DIM:
        return 4 if head_dim < WHOLE_DIM else 6
    return next((cost for most, cost in ((4, 6), (8, 5)) if rows <= most), 4)


WHOLE_BATCH = 4
"""Requests from which on one warp takes all query heads of a KV head, where there are more than
eight; below, two warps share them. One warp reads and unpacks every code once, and has more code to
fetch and twice as much to merge."""
WHOLE_DIM = 128
"""Widest rows of which a warp holds the outputs of 16 query heads."""


def most_stages(head_dim: int, rows: int, whole: bool) -> int:
    """Most stages of `CudaTiles` for a warp with so many query rows. More tiles on their way are
    good for warps that wait for memory, and else keep the query waiting.

    Args:
        whole: whether a tile is one group of tokens of as many KV heads as a block has warps.
    """
    if head_dim > WHOLE_DIM or rows > 8 or (rows > 4 and not whole):
        return 4
    return 6 if whole else 5


NARROW_DIM = 64
CROWD = 128
"""KV heads of all requests from which on two blocks share a multiprocessor, where rows are at most
`NARROW_DIM` wide."""

LEAST_STAGES = 3
MOST_RESIDENT = 2
CUDA = CudaTiles()
"""The tiles in use, measured on one H200 with batches of 1 to 16 and 2,048 to 100,000 tokens by
`contrib/kernel_bench/run.py --variants`."""

VARIANTS = (
    CUDA,
    replace(CUDA, stages=4),
    replace(CUDA, window_cost=4),
    replace(CUDA, start=0),
    replace(CUDA, stages=4, resident=2),
)


def merge_tiles(splits: int, head_dim: int) -> tuple[int, int, int]:
    """Splits per step, channels per program, and warps of stage 2."""
    if head_dim == 512 and splits <= 16:
        return MERGE_WIDE
    return next(tiles for most, tiles in MERGE.items() if splits <= most)
