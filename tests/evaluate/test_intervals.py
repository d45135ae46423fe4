"""Errors and intervals over sequences, against their closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oscar_zoo.evaluate.measure import Measurement
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.statistics import difference, standard_error

TASK = Perplexity.from_tokens(torch.arange(1000), windows=3, length=100)


def measured(losses: list[float], tokens: int = 100) -> Measurement:
    """Sequences of equal length with these mean losses."""
    return Measurement.of(TASK, [(tokens * loss, tokens) for loss in losses])


def test_the_error_of_perplexity_is_that_of_the_mean_loss() -> None:
    random = np.random.default_rng(1)
    losses = [float(2 + 0.1 * x) for x in random.standard_normal(40)]
    found = measured(losses)
    closed = found.value * float(np.std(losses, ddof=1)) / math.sqrt(40)
    assert standard_error(TASK.result, found) == pytest.approx(closed, rel=0.06)
    assert standard_error(TASK.result, found) == standard_error(TASK.result, found), "the same seed"


def test_what_both_caches_share_is_not_in_the_error_of_their_difference() -> None:
    random = np.random.default_rng(2)
    losses = [float(2 + random.standard_normal()) for _ in range(40)]
    one, other = measured([loss + 0.01 for loss in losses]), measured(losses)
    found = difference(TASK.result, one, other, more_is_worse=True)
    assert found is not None
    assert found.difference == pytest.approx(one.value - other.value)
    assert found.lower95 < found.difference < found.no_worse_than < found.upper95
    assert found.lower95 > 0, (
        "paired, a rise of 1 % is certain although sequences differ by far more"
    )
    assert (standard_error(TASK.result, one) or 0) > found.difference


def test_one_sequence_has_no_error() -> None:
    assert standard_error(TASK.result, measured([2.0])) is None
    assert difference(TASK.result, measured([2.0]), measured([2.1]), more_is_worse=True) is None
