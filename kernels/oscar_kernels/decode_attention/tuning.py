"""Tiles and split counts of split-KV attention: a plain table, measured on a GPU, that never looks at lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How stage 1 is cut.

    Attributes:
        splits: programs that share a request's INT2 tokens.
        exact_splits: programs that share its windows.
        block_n: INT2 tokens of a step.
        exact_block_n: exact tokens of a step.
        rows: query rows of a program: the heads of a KV head, times `tokens`, padded.
        tokens: query tokens of a program; 0 for decode.
        num_warps, stages: of stage 1.
        registers: of a thread at most; `None` leaves it to the compiler.
    """

    splits: int
    exact_splits: int
    block_n: int
    exact_block_n: int
    rows: int
    tokens: int
    num_warps: int
    stages: int
    registers: int | None = None


PROGRAMS_PER_SM = 12
"""One wave: registers hold this many programs of one warp."""

LEAST_PROGRAMS = 8
"""Of a request and KV head: with less, the windows' program is the last to end."""

MOST_SPLITS = 512

MERGE = {16: (16, 128, 2), 64: (64, 32, 4), 1024: (256, 32, 4)}
"""Up to this many splits: splits of a step, channels of a program, warps."""


def decode_tiles(*, batch: int, num_kv_heads: int, group: int, head_dim: int, exact: int, sms: int) -> Tiles:
    """Tiles of decode.

    Args:
        batch: requests.
        group: query heads of a KV head.
        head_dim: the larger one of K and V.
        exact: window positions of a request at most.
        sms: multiprocessors of the device.
    """
    programs = max(LEAST_PROGRAMS, round(sms * PROGRAMS_PER_SM / (batch * num_kv_heads)))
    exact_splits = min(max(1, programs // 8), -(-exact // 64))
    rows = 8 if group <= 8 else 16
    return Tiles(
        splits=min(programs - exact_splits, MOST_SPLITS),
        exact_splits=exact_splits,
        block_n=32 if rows == 16 and head_dim > 128 else 64,
        exact_block_n=16,
        rows=rows,
        tokens=0,
        num_warps=1,
        stages=5,
    )


def extend_tiles(
    *, tokens: int, requests: int, num_kv_heads: int, group: int, head_dim: int, exact: int, sms: int
) -> Tiles:
    """Tiles of a short extend of `requests` with `tokens` new tokens in all."""
    each = 16 // group
    blocks = -(-tokens // each) + requests
    programs = max(1, round(sms * 32 / (blocks * num_kv_heads)))
    return Tiles(
        splits=min(programs, MOST_SPLITS),
        exact_splits=1 if exact else 0,
        block_n=64 if head_dim <= 128 else 32,
        exact_block_n=16,
        rows=16,
        tokens=each,
        num_warps=1,
        stages=5,
    )


def merge_tiles(splits: int) -> tuple[int, int, int]:
    """Splits of a step, channels of a program and warps of stage 2."""
    return next(tiles for most, tiles in MERGE.items() if splits <= most)
