"""The statistics of a benchmark. Pure.

Values are arrays `[questions, repeats]`: what each answer was worth, usually 0 or 1. The questions
are a sample of all that could have been asked. Repeats of one question are not independent, so
questions are the unit of every interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from oscar_zoo.evaluate.sign_test import sign_test

Values = np.ndarray[Any, np.dtype[np.float64]]
RESAMPLES = 10_000
"""Of the bootstrap."""
_AT_ONCE = 1 << 22
"""Numbers that one step of the bootstrap draws, at most."""


@dataclass(frozen=True)
class Mean:
    """The mean of all answers.

    Attributes:
        value: the mean over questions and repeats.
        stderr: its standard error over questions.
        n: questions.
        by_repeat: the mean of every repeat.
    """

    value: float
    stderr: float
    n: int
    by_repeat: tuple[float, ...]


@dataclass(frozen=True)
class PairedDifference:
    """One cache minus another, over the same questions.

    Attributes:
        n: questions.
        value: difference of the two means.
        lower95, upper95: two-sided interval of 95 %.
        p_value: of McNemar's exact test; `None` where an answer may be worth something between 0
            and 1.
        no_worse_than: with 95 % confidence the first cache loses at most this much, one-sided.
    """

    n: int
    value: float
    lower95: float
    upper95: float
    p_value: float | None
    no_worse_than: float


def mean(values: Values) -> Mean:
    """The mean and its standard error, clustered by question.

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
    by_repeat = tuple(float(one) for one in values.mean(axis=0))
    return Mean(value, max(clustered, independent), n, by_repeat)


def compare(one: Values, other: Values, *, seed: int = 0) -> PairedDifference:
    """`one` minus `other`, question by question; the same `seed` gives the same interval.

    The interval is the percentile bootstrap of the mean difference over questions (B. Efron and
    R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13). The one-sided bound is its
    5 % quantile. It is never below `1 - 0.05^(1/n)`: this large a share of all questions may still
    be lost when none of `n` was (J. Hanley and A. Lippman-Hand, JAMA 249, 1983).
    """
    differences = one.mean(axis=1) - other.mean(axis=1)
    n = len(differences)
    drawn = _bootstrap(differences, seed)
    low, bound, high = np.quantile(drawn, (0.025, 0.05, 0.975))
    return PairedDifference(
        n=n,
        value=float(differences.mean()),
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


def _binary(values: Values) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _bootstrap(differences: Values, seed: int) -> Values:
    """Means of `RESAMPLES` samples with replacement."""
    random, n = np.random.default_rng(seed), len(differences)
    step = max(1, _AT_ONCE // n)
    drawn = [
        differences[random.integers(0, n, (min(step, RESAMPLES - start), n))].mean(axis=1)
        for start in range(0, RESAMPLES, step)
    ]
    return np.concatenate(drawn)
