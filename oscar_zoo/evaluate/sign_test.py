"""The exact sign test of two runs over the same questions. Pure."""

from __future__ import annotations

import math


def sign_test(one: int, other: int) -> float:
    """Exact two-sided probability that a fair coin splits `one + other` throws as unevenly.

    Args:
        one: questions that only the first run has right.
        other: questions that only the second run has right.
    """
    throws, few = one + other, min(one, other)
    return min(1.0, 2 * sum(math.comb(throws, k) for k in range(few + 1)) / (1 << throws))
