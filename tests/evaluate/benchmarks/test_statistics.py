"""The statistics of benchmarks, recomputed here from their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from oscar_zoo.evaluate.statistics import compare, mcnemar, mean_error


def values(questions: int, repeats: int, seed: int = 0, share: float = 0.6) -> np.ndarray:
    """Answers to questions of differing difficulty."""
    random = np.random.default_rng(seed)
    hard = random.beta(4 * share, 4 * (1 - share), (questions, 1))
    return (random.random((questions, repeats)) < hard).astype(float)


def test_the_error_is_clustered_by_question() -> None:
    """Miller's sum over all pairs of answers to one question, written out."""
    found = values(40, 3)
    middle, n = found.mean(), found.size
    pairs = sum(
        (row[i] - middle) * (row[j] - middle) for row in found for i in range(3) for j in range(3)
    )
    error = math.sqrt(pairs) / n * math.sqrt(40 / 39)
    assert mean_error(found) == pytest.approx(error, rel=1e-12)
    assert error > math.sqrt(middle * (1 - middle) / n), "questions differ, so the error is larger"


def test_repeats_that_happen_to_agree_do_not_make_the_error_vanish() -> None:
    """Every question is right once in two: the means are all equal."""
    assert mean_error(np.array([[1.0, 0.0]] * 8)) == pytest.approx(math.sqrt(0.25 / 16))


def test_the_interval_is_that_of_every_resample() -> None:
    """Five questions have 3,125 resamples, which can be counted."""
    one = np.array([[1.0], [0.0], [0.0], [1.0], [1.0]])
    other = np.array([[0.0], [1.0], [1.0], [1.0], [1.0]])
    gains = (one - other)[:, 0]
    every = sorted(sum(drawn) / 5 for drawn in itertools.product(gains, repeat=5))
    low, high = (every[int(q * len(every))] for q in (0.025, 0.975))
    found = compare(one, other)
    assert (found.n, found.difference) == (5, pytest.approx(-0.2))
    assert (found.lower95, found.upper95) == pytest.approx((low, high))
    assert found.no_worse_than == pytest.approx(-every[int(0.05 * len(every))])


def test_equal_answers_prove_no_more_than_their_number_allows() -> None:
    """A share of `x` lost questions hides from 40 of them with probability `(1 - x)^40`."""
    same = values(40, 2)
    found = compare(same, same)
    assert (found.difference, found.lower95, found.upper95, found.p_value) == (0, 0, 0, 1)
    assert (1 - found.no_worse_than) ** 40 == pytest.approx(0.05)


def test_the_one_sided_bound_holds_as_often_as_it_says() -> None:
    """The true loss is 8 points; at most about one run in twenty may claim less."""
    random, wrong = np.random.default_rng(7), 0
    for run in range(60):
        base = random.random((150, 1)) < 0.7
        lost = base & (random.random((150, 1)) < 0.08 / 0.7)
        found = compare((base & ~lost).astype(float), base.astype(float), seed=run)
        wrong += found.no_worse_than < 0.08
    assert wrong <= 8, wrong


def test_mcnemar_counts_the_ways_a_coin_may_fall() -> None:
    one, other = values(30, 3, seed=1), values(30, 3, seed=2)
    first = [sum(row) >= 2 for row in one]
    second = [sum(row) >= 2 for row in other]
    gained = sum(a and not b for a, b in zip(first, second, strict=True))
    missed = sum(b and not a for a, b in zip(first, second, strict=True))
    throws = gained + missed
    assert 4 < throws < 20
    uneven = sum(
        abs(2 * sum(coins) - throws) >= abs(gained - missed)
        for coins in itertools.product((0, 1), repeat=throws)
    )
    assert mcnemar(one, other) == pytest.approx(uneven / 2**throws)


def test_mcnemar_does_not_apply_to_partial_answers() -> None:
    assert mcnemar(np.array([[0.5], [1.0]]), np.array([[1.0], [0.0]])) is None
