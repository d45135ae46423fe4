"""How sure a measurement over a few sequences is: errors and intervals by resampling sequences.

Predictions of one sequence depend on each other, and sequences are few. So whole sequences are
drawn with replacement, the same ones for both caches, and the number is computed from the sums of
those that were drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oscar_zoo.evaluate.tasks.base import Measurement

RESAMPLES = 2000
_Drawn = np.ndarray[Any, np.dtype[np.float64]]


class Adding(Protocol):
    """A number that is made of sums over sequences, such as a `Task`."""

    def result(self, total: float, number: int) -> float:
        """The number, from the sums."""


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


def standard_error(task: Adding, found: Measurement, *, seed: int = 0) -> float | None:
    """Standard error of the number of `task` over its sequences; `None` for a single one."""
    n = len(found.parts)
    if n < 2:
        return None
    return _spread(_resampled(task, found, seed), n)


def difference(
    task: Adding, one: Measurement, other: Measurement, *, seed: int = 0
) -> Interval | None:
    """`one` minus `other` over the same sequences; `None` for a single one."""
    if len(one.parts) < 2:
        return None
    drawn = _resampled(task, one, seed) - _resampled(task, other, seed)
    ends = np.quantile(drawn, (0.025, 0.975, 0.05, 0.95))
    return Interval(one.value - other.value, *map(float, ends))


def relative_change(
    task: Adding, one: Measurement, other: Measurement, *, seed: int = 0
) -> tuple[float, float | None]:
    """`one / other - 1`, and its standard error over the same sequences; `None` for a single one,
    and where the change is not finite."""
    change = one.value / other.value - 1
    if len(one.parts) < 2 or not math.isfinite(change):
        return change, None
    with np.errstate(invalid="ignore"):
        drawn = _resampled(task, one, seed) / _resampled(task, other, seed)
        error = _spread(drawn, len(one.parts))
    return change, error if math.isfinite(error) else None


def _spread(drawn: _Drawn, n: int) -> float:
    """Standard error over `n` sequences."""
    return float(drawn.std() * math.sqrt(n / (n - 1)))


def _resampled(task: Adding, found: Measurement, seed: int) -> _Drawn:
    """The number of `task` over each of `RESAMPLES` samples; a seed draws the same sequences."""
    parts = np.asarray(found.parts, dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(0, len(parts), (RESAMPLES, len(parts)))
    sums = parts[chosen].sum(axis=1)
    return np.array([task.result(float(total), int(number)) for total, number in sums])
