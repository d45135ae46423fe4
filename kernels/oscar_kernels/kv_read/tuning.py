"""Tiles of the read kernel: a plain table, measured on one H200."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadTiles:
    """How one launch is cut.

    Attributes:
        block_m: lines (a token and a KV head) of a program.
        warps: warps of a program.
    """

    block_m: int
    warps: int


def read_tiles(head_dim: int) -> ReadTiles:
    """One warp and few lines per program, because stores need many programs in flight."""
    return ReadTiles(block_m=16 if head_dim <= 256 else 8, warps=1)
