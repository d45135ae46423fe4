"""Errors and intervals over questions and over sequences, recomputed here from their definitions
and closed forms."""

import itertools
import math

import numpy as np
import pytest
import torch

from oscar_zoo.evaluate.measure import Measurement
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.statistics import compare, difference, mcnemar, mean_error, standard_error

TASK = Perplexity.from_tokens(torch.arange(1000), windows=3, length=100)


def values(questions: int, repeats: int, seed: int = 0, share: float = 0.6) -> np.ndarray:
    """Answers to questions of differing difficulty."""
    random = np.random.default_rng(seed)
    hard = random.beta(4 * share, 4 * (1 - share), (questions, 1))
    return (random.random((questions, repeats)) < hard).astype(float)


def test_the_error_is_clustered_by_question() -> None:
    """Miller's sum over all pairs of answers to one question, written out; and repeats that happen
    to agree do not make it vanish."""
    found = values(40, 3)
    middle, n = found.mean(), found.size
    pairs = sum(
        (row[i] - middle) * (row[j] - middle) for row in found for i in range(3) for j in range(3)
    )
    error = math.sqrt(pairs) / n * math.sqrt(40 / 39)
    assert mean_error(found) == pytest.approx(error, rel=1e-12)
    assert error > math.sqrt(middle * (1 - middle) / n), "questions differ, so the error is larger"
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
    first, second = one.sum(axis=1) >= 2, other.sum(axis=1) >= 2
    gained, missed = int((first & ~second).sum()), int((second & ~first).sum())
    throws = gained + missed
    assert 4 < throws < 20
    uneven = sum(
        abs(2 * sum(coins) - throws) >= abs(gained - missed)
        for coins in itertools.product((0, 1), repeat=throws)
    )
    assert mcnemar(one, other) == pytest.approx(uneven / 2**throws)
    partial = np.array([[0.5], [1.0]])
    assert mcnemar(partial, 1 - partial) is None


def measured(losses: list[float]) -> Measurement:
    """Sequences of 100 tokens with these mean losses."""
    return Measurement.of(TASK, [(100 * loss, 100) for loss in losses])


def test_the_error_of_perplexity_is_that_of_the_mean_loss() -> None:
    losses = [float(2 + 0.1 * x) for x in np.random.default_rng(1).standard_normal(40)]
    found = measured(losses)
    closed = found.value * float(np.std(losses, ddof=1)) / math.sqrt(40)
    assert standard_error(TASK.result, found) == pytest.approx(closed, rel=0.06)


def test_what_both_caches_share_is_not_in_the_error_of_their_difference() -> None:
    losses = [float(2 + x) for x in np.random.default_rng(2).standard_normal(40)]
    one, other = measured([loss + 0.01 for loss in losses]), measured(losses)
    found = difference(TASK.result, one, other, more_is_worse=True)
    assert found is not None
    assert found.difference == pytest.approx(one.value - other.value)
    # Paired, a rise of 1 % is certain although sequences differ by far more.
    assert 0 < found.lower95 < found.difference < found.no_worse_than < found.upper95
    assert (standard_error(TASK.result, one) or 0) > found.difference


def test_one_sequence_has_no_error() -> None:
    one, other = measured([2.0]), measured([2.1])
    assert standard_error(TASK.result, one) is None
    assert difference(TASK.result, one, other, more_is_worse=True) is None
