"""Figures of a batch from hand-made arrival times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.evaluate.bench.run import Figures, figures, medians, spread

MILLI = 1e-3


def steady(start: float, gap: float, count: int) -> list[tuple[float, int]]:
    return [(start + gap * i, i + 1) for i in range(count)]


@given(
    starts=st.lists(st.floats(0.01, 0.1), min_size=1, max_size=5),
    gap=st.floats(1e-3, 1e-1),
    count=st.integers(200, 240),
)
def test_evenly_spaced_tokens_give_their_spacing(
    starts: list[float], gap: float, count: int
) -> None:
    found = figures([steady(start, gap, count) for start in starts])
    assert found.ttft_s == max(starts)
    assert found.ms_per_token == pytest.approx(gap / MILLI)
    assert found.tokens_per_second == pytest.approx(len(starts) / gap)


def test_the_first_quarter_does_not_count() -> None:
    slow = [(1.0 + 0.5 * i, i + 1) for i in range(24)]
    fast = [(slow[-1][0] + 0.01 * (i + 1), 25 + i) for i in range(73)]
    found = figures([slow + fast])
    assert found.ms_per_token == pytest.approx(10)
    assert found.tokens_per_second == pytest.approx(100)


def test_tokens_that_arrive_together_share_their_time_and_a_late_one_moves_only_the_rate() -> None:
    together = [(0.04 * i, 1 + 4 * i) for i in range(40)]
    late = [(t + (1.0 if n > 140 else 0.0), n) for t, n in together]
    found, slower = figures([together]), figures([late])
    assert found.ms_per_token == slower.ms_per_token == pytest.approx(10)
    assert slower.tokens_per_second < found.tokens_per_second  # type: ignore[operator]


def test_only_the_time_when_all_requests_run_counts() -> None:
    early = steady(0.1, 0.002, 400)  # fast while it is alone, until 0.9 s
    late = steady(0.5, 0.010, 400)
    found = figures([early, late])
    assert (found.ttft_s, found.ttft_median_s) == (0.5, pytest.approx(0.3))
    assert found.tokens_per_second == pytest.approx(500 + 100, rel=0.01)


def test_too_few_tokens_give_no_figure_instead_of_a_guess() -> None:
    for requests in ([[(0.2, 1)]], [steady(0.1, 0.01, 8), steady(0.9, 0.01, 8)]):
        found = figures(requests)
        assert found.ttft_s == max(one[0][0] for one in requests)
        assert found.ms_per_token is None and found.tokens_per_second is None


def test_several_repeats_give_medians_and_their_ends_figure_by_figure() -> None:
    """A repeat with too few tokens for one figure still counts for the others."""
    repeats = [
        Figures(3.0, 1.0, 8.0, 10.0),
        Figures(1.0, 3.0, None, None),
        Figures(2.0, 2.0, 4.0, 30.0),
    ]
    assert medians(repeats) == Figures(2.0, 2.0, 6.0, 20.0)
    ends = {"ttft_s": (1.0, 3.0), "ttft_median_s": (1.0, 3.0)}
    assert spread(repeats) == ends | {"ms_per_token": (4.0, 8.0), "tokens_per_second": (10.0, 30.0)}
    assert medians(repeats[1:2]) == repeats[1] and spread(repeats[1:2]) == {
        "ttft_s": (1.0, 1.0),
        "ttft_median_s": (3.0, 3.0),
    }
