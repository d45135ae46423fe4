"""How sure a measurement over a few sequences is: errors and intervals by resampling sequences.

Predictions of one sequence depend on each other, and sequences are few. So whole sequences are
drawn with replacement, the same ones for both caches, and the number is computed from the sums of
those that were drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from oscar_zoo.evaluate.tasks.base import Measurement, Task

RESAMPLES = 2000
_Drawn = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Interval:
    """A difference and how far chance may have moved it.

    Attributes:
        value: the difference.
        lower95, upper95: two-sided interval of 95 %.
        lower90, upper90: ends that hold with 95 % confidence each, one-sided.
    """

    value: float
    lower95: float
    upper95: float
    lower90: float
    upper90: float


def standard_error(task: Task, found: Measurement, *, seed: int = 0) -> float | None:
    """Standard error of the number of `task` over its sequences; `None` for a single one."""
    n = len(found.parts)
    if n < 2:
        return None
    return float(_resampled(task, found, seed).std() * math.sqrt(n / (n - 1)))


def difference(
    task: Task, one: Measurement, other: Measurement, *, seed: int = 0
) -> Interval | None:
    """`one` minus `other` over the same sequences; `None` for a single one."""
    if len(one.parts) < 2:
        return None
    drawn = _resampled(task, one, seed) - _resampled(task, other, seed)
    ends = np.quantile(drawn, (0.025, 0.975, 0.05, 0.95))
    return Interval(one.value - other.value, *map(float, ends))


def _resampled(task: Task, found: Measurement, seed: int) -> _Drawn:
    """The number of `task` over each of `RESAMPLES` samples; a seed draws the same sequences."""
    parts = np.asarray(found.parts, dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(0, len(parts), (RESAMPLES, len(parts)))
    sums = parts[chosen].sum(axis=1)
    return np.array([task.result(float(total), int(number)) for total, number in sums])
