"""Which groups of channels may share a scale in the cache of a model. Needs no torch."""

from __future__ import annotations

import math

from oscar_kernels.spec import GROUPS, check_group_size
from oscar_zoo.errors import UsageError


def check_groups(
    dims: tuple[int, int], group_size: int, model: str, *, option: str = "a group size of {}"
) -> None:
    """Refuse groups that rows of a cache cannot be cut into.

    Args:
        dims: channels of a row of K and of a row of V.
    """
    try:
        check_group_size(dims, group_size)
    except ValueError as error:
        raise UsageError(
            f"a group size of {group_size} does not go with {model}: {error}.",
            hint=f"use {option.format(largest_group(dims))}",
        ) from None


def largest_group(dims: tuple[int, int]) -> int:
    """The largest group size for rows of K and of V: one that divides both, or one row of the
    narrower of them where no common divisor cuts both into 1, 2 or 4 groups."""
    common = math.gcd(*dims)
    both = all(width // common in GROUPS for width in dims)
    return common if both else min(dims)
