"""How sure a measurement is. Pure.

Of a benchmark, values are arrays `[questions, repeats]`: what each answer was worth, usually 0 or
1. Repeats of one question are not independent, so questions are the unit of every interval.

Of a task over a few sequences, whole sequences are drawn with replacement, the same ones for both
caches, because predictions of one sequence depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from oscar_zoo.artifact.specs import Paired

if TYPE_CHECKING:
    from oscar_zoo.evaluate.measure import Measurement

Values = np.ndarray[Any, np.dtype[np.float64]]
DRAWS = 10_000
"""Of the bootstrap over questions."""
_AT_ONCE = 1 << 22
"""Numbers that one step of the bootstrap draws, at most."""
RESAMPLES = 2000
"""Of the bootstrap over sequences."""
Result = Callable[[float, int], float]
"""The number that is reported, from sums over sequences; see `Task.result`."""


def mean_error(values: Values) -> float:
    """The standard error of the mean of `values`, clustered by question.

    With the same number of repeats for every question the clustered error is the error of the mean
    of the question means `m`: `sqrt(sum((m - mean(m))^2) / (n (n - 1)))`. Answers to one question
    cannot tell more than independent ones do, so the error is not below `sqrt(p (1 - p) / N)` of
    all `N` answers, where the few repeats happen to say less.

    Source: E. Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2, with the usual
    correction `n / (n - 1)`.
    """
    questions = values.mean(axis=1)
    n, value = len(questions), float(questions.mean())
    clustered = 0.0 if n < 2 else float(questions.std(ddof=1) / math.sqrt(n))
    independent = math.sqrt(value * (1 - value) / values.size) if _binary(values) else 0.0
    return max(clustered, independent)


def compare(one: Values, other: Values, *, seed: int = 0) -> Paired:
    """`one` minus `other`, question by question; the same `seed` gives the same interval.

    The interval is the percentile bootstrap of the mean difference over questions (B. Efron and
    R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13). The one-sided bound is its
    5 % quantile. It is never below `1 - 0.05^(1/n)`: this large a share of all questions may still
    be lost when none of `n` was (J. Hanley and A. Lippman-Hand, JAMA 249, 1983).
    """
    differences = one.mean(axis=1) - other.mean(axis=1)
    random, n = np.random.default_rng(seed), len(differences)
    step = max(1, _AT_ONCE // n)
    sizes = [min(step, DRAWS - start) for start in range(0, DRAWS, step)]
    drawn = np.concatenate(
        [differences[random.integers(0, n, (size, n))].mean(axis=1) for size in sizes]
    )
    low, bound, high = np.quantile(drawn, (0.025, 0.05, 0.975))
    return Paired(
        n=n,
        difference=float(differences.mean()),
        lower95=float(low),
        upper95=float(high),
        p_value=mcnemar(one, other),
        no_worse_than=max(-float(bound), 1 - 0.05 ** (1 / n)),
    )


def mcnemar(one: Values, other: Values) -> float | None:
    """Two-sided p-value of McNemar's exact test over questions, or `None` where it does not apply.

    A question counts as right when more than half of its repeats are. Only questions that one side
    alone has right are counted, and a fair coin would split them evenly.

    Source: Q. McNemar, Psychometrika 12, 1947, with the exact binomial in place of chi-squared.
    """
    if not (_binary(one) and _binary(other)):
        return None
    first, second = one.mean(axis=1) > 0.5, other.mean(axis=1) > 0.5
    return sign_test(int((first & ~second).sum()), int((second & ~first).sum()))


def sign_test(one: int, other: int) -> float:
    """Exact two-sided probability that a fair coin splits `one + other` throws as unevenly: the
    questions that only the first run, and that only the second, has right."""
    throws, few = one + other, min(one, other)
    return min(1.0, 2 * sum(math.comb(throws, k) for k in range(few + 1)) / (1 << throws))


def _binary(values: Values) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def standard_error(result: Result, found: Measurement) -> float | None:
    """Over the sequences; `None` for a single one."""
    n = len(found.parts)
    return None if n < 2 else _spread(_resampled(result, found), n)


def difference(
    result: Result, one: Measurement, other: Measurement, *, more_is_worse: bool
) -> Paired | None:
    """`one` minus `other` over the same sequences; `None` for a single one."""
    if len(one.parts) < 2:
        return None
    drawn = _resampled(result, one) - _resampled(result, other)
    # The ends of 90 % hold with 95 % confidence each, one-sided.
    low, high, least, most = map(float, np.quantile(drawn, (0.025, 0.975, 0.05, 0.95)))
    if not math.isfinite(high):
        return None
    return Paired(
        n=len(one.parts),
        difference=one.value - other.value,
        lower95=low,
        upper95=high,
        no_worse_than=most if more_is_worse else -least,
    )


def relative_change(
    result: Result, one: Measurement, other: Measurement
) -> tuple[float, float | None]:
    """`one / other - 1`, and its standard error over the same sequences; `None` for a single one,
    and where the change is not finite."""
    change = one.value / other.value - 1
    if len(one.parts) < 2 or not math.isfinite(change):
        return change, None
    with np.errstate(invalid="ignore"):
        drawn = _resampled(result, one) / _resampled(result, other)
        error = _spread(drawn, len(one.parts))
    return change, error if math.isfinite(error) else None


def _spread(drawn: Values, n: int) -> float:
    return float(drawn.std() * math.sqrt(n / (n - 1)))


def _resampled(result: Result, found: Measurement) -> Values:
    """The number over each of `RESAMPLES` samples, which are the same for every cache."""
    parts = np.asarray(found.parts, dtype=np.float64)
    chosen = np.random.default_rng(0).integers(0, len(parts), (RESAMPLES, len(parts)))
    sums = parts[chosen].sum(axis=1)
    return np.array([result(float(total), int(number)) for total, number in sums])
