"""How a row is quantized: everything that changes its codes, in one frozen value. No torch.

Identifiers: quantizer `asym-minmax-u2/1` where every code has 2 bits, `asym-minmax-u24/1` where a
side of a layer has 2 or 4, and clip `absrank-floor/1`. A change of any code needs a new identifier.
Keys may be rounded with feedback instead of to the nearest code; a rotation file has its weights.

Order of the codes of a row in its bytes, with `q = head_dim // 4`:

* 2 bits: byte `j` of a row holds the codes of channels `j, j + q, j + 2q, j + 3q` in bits 0-1, 2-3,
  4-5, 6-7.
* 4 bits: byte `j` holds channels `j, j + q` in bits 0-3 and 4-7, and byte `q + j` holds channels
  `j + 2q, j + 3q`.

So a kernel unpacks contiguous quarters of a row with shifts and no shuffle. Scale and offset of
each group follow in their own tensor, interleaved `[scale, offset]` per group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BITS = 2
LEVELS = 1 << BITS
"""Of the codes that a row has unless its `QuantSpec` says otherwise."""
WIDTHS = (2, 4)
"""Bits that the codes of a row may have."""
PLAIN = 16
"""Bits of a channel that has no code, but is stored in bfloat16: the rotary key beside a latent."""
QUANTIZER = "asym-minmax-u2/1"
MIXED_QUANTIZER = "asym-minmax-u24/1"
CLIP_ALGORITHM = "absrank-floor/1"
MIN_RANGE = 1e-8
"""Smallest `max - min` of a group; keeps the scale of a constant row above zero (OSCAR, INT2
quantizer)."""
GROUPS = (1, 2, 4)
"""Groups that a row may have: the quarters that are packed together are not cut."""


def group_channels(head_dim: int, group_size: int) -> int:
    """Channels of a group in rows of `head_dim` channels, where at most `group_size` share a scale.

    They are `group_size` where that cuts the row into 1, 2 or 4 groups. Else the row is cut into
    as few equal groups as possible, for a model whose K and V rows differ in width: with 128, rows
    of 192 and of 128 channels have groups of 96 and of 128. Where no cut is possible it is
    `group_size`, which `QuantSpec` refuses.
    """
    if _cuts(head_dim, group_size):
        return group_size
    equal = (head_dim // n for n in GROUPS if head_dim % n == 0 and head_dim // n <= group_size)
    return next(equal, group_size)


def check_group_size(dims: tuple[int, int], group_size: int) -> None:
    """Check that rows of K and of V can be cut into groups.

    Args:
        dims: channels of a row of each.
    """
    exact = any(_cuts(dim, group_size) for dim in dims)
    for dim in dims:
        QuantSpec(dim, group_channels(dim, group_size) if exact else group_size)


def _cuts(head_dim: int, group_size: int) -> bool:
    return any(group_size * n == head_dim for n in GROUPS)


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
        bits: of a code, 2 or 4; `PLAIN` for a row without codes, which has no groups.
    """

    head_dim: int
    group_size: int
    clip_ratio: float = 0.0
    scale_dtype: str = "float16"
    bits: int = BITS

    def __post_init__(self) -> None:
        if self.head_dim <= 0 or self.head_dim % 4:
            raise ValueError(f"head_dim must be a positive multiple of 4, not {self.head_dim}")
        if self.group_size <= 0 or self.head_dim % self.group_size:
            raise ValueError(
                f"group_size {self.group_size} does not divide head_dim {self.head_dim}"
            )
        if self.bits == PLAIN:
            return
        if self.num_groups not in GROUPS:
            raise ValueError(f"{self.num_groups} groups per row; 1, 2 or 4 are supported")
        if self.bits not in WIDTHS:
            raise ValueError(f"codes of {self.bits} bits; 2 or 4 are supported")
        if not 0.0 <= self.clip_ratio <= 1.0:
            raise ValueError(f"clip_ratio must lie in 0 .. 1, not {self.clip_ratio}")
        if self.scale_dtype not in ("float16", "bfloat16", "float32"):
            raise ValueError(
                f"scale_dtype {self.scale_dtype!r} is not float16, bfloat16 or float32"
            )

    @property
    def levels(self) -> int:
        """Values that a code may have: 4 or 16."""
        return 1 << self.bits

    @property
    def num_groups(self) -> int:
        """Groups per row."""
        return 0 if self.bits == PLAIN else self.head_dim // self.group_size

    @property
    def clip_index(self) -> int | None:
        """Index into the ascending absolute values of a row whose element is the threshold; `None`
        for no clipping.

        Computed once in double precision on the host, so that every kernel gets the same integer.
        """
        if self.clip_ratio == 0.0:
            return None
        return min(math.floor(self.clip_ratio * self.head_dim), self.head_dim - 1)


def code_bytes(spec: QuantSpec) -> int:
    """Bytes of packed codes of one row."""
    return spec.head_dim * spec.bits // 8


def row_bytes(spec: QuantSpec) -> int:
    """Bytes of one token and KV head, of K or V: codes, then a scale and an offset per group."""
    return code_bytes(spec) + spec.num_groups * 2 * (4 if spec.scale_dtype == "float32" else 2)
