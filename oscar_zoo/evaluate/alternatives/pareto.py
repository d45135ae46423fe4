"""Which caches no other beats in bits and in loss at once."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pareto_optimal(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each point, `(bits, loss)`, is one that no other equals or beats in both.

    Of equal points all are optimal. A loss that is not a number is never optimal.
    """
    return [
        not math.isnan(loss)
        and not any(
            other != (bits, loss) and other[0] <= bits and other[1] <= loss for other in points
        )
        for bits, loss in points
    ]
