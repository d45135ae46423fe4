"""How a row is quantized: everything that changes its codes, in one frozen value. No torch.

Identifiers: quantizer `asym-minmax-u2/1`, clip `absrank-floor/1`. A change of any code needs a new
identifier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BITS = 2
LEVELS = 1 << BITS
QUANTIZER = "asym-minmax-u2/1"
CLIP_ALGORITHM = "absrank-floor/1"
MIN_RANGE = 1e-8
"""Smallest `max - min` of a group; keeps the scale of a constant row above zero (OSCAR, INT2
quantizer)."""


@dataclass(frozen=True)
class QuantSpec:
    """How one row of `head_dim` channels is quantized.

    Attributes:
        head_dim: channels of a row; a multiple of 4 and of `group_size`.
        group_size: consecutive channels that share one scale and one offset.
        clip_ratio: 0 for no clipping; else the order statistic
            `min(floor(clip_ratio * head_dim), head_dim - 1)` of the sorted absolute values is the
            largest magnitude kept.
        scale_dtype: `float16`, `bfloat16` or `float32`: storage type of scale and offset.
    """

    head_dim: int
    group_size: int
    clip_ratio: float = 0.0
    scale_dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.head_dim <= 0 or self.head_dim % 4:
            raise ValueError(f"head_dim must be a positive multiple of 4, not {self.head_dim}")
        if self.group_size <= 0 or self.head_dim % self.group_size:
            raise ValueError(
                f"group_size {self.group_size} does not divide head_dim {self.head_dim}"
            )
        if self.num_groups not in (1, 2, 4):
            raise ValueError(f"{self.num_groups} groups per row; 1, 2 or 4 are supported")
        if not 0.0 <= self.clip_ratio <= 1.0:
            raise ValueError(f"clip_ratio must lie in 0 .. 1, not {self.clip_ratio}")
        if self.scale_dtype not in ("float16", "bfloat16", "float32"):
            raise ValueError(
                f"scale_dtype {self.scale_dtype!r} is not float16, bfloat16 or float32"
            )

    @property
    def num_groups(self) -> int:
        """Groups per row."""
        return self.head_dim // self.group_size

    @property
    def clip_index(self) -> int | None:
        """Index into the ascending absolute values of a row whose element is the threshold; `None`
        for no clipping.

        Computed once in double precision on the host, so that every kernel gets the same integer.
        """
        if self.clip_ratio == 0.0:
            return None
        return min(math.floor(self.clip_ratio * self.head_dim), self.head_dim - 1)
