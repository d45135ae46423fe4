"""Work over all cores: results in order, and BLAS as it was before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oscar_zoo.artifact import checks


def test_results_come_in_order() -> None:
    assert list(checks.over_cores(lambda n: n * n, range(100))) == [n * n for n in range(100)]


def test_nothing_more_is_begun_once_the_caller_stops() -> None:
    begun = []
    results = checks.over_cores(begun.append, range(10_000))
    assert isinstance(results, Iterator)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(begun) < 10_000


def test_blas_has_one_thread_inside_and_its_own_number_after() -> None:
    blas = checks._openblas()
    if blas is None:
        pytest.skip("numpy has another BLAS here")
    threads, set_threads = blas
    before = threads()
    set_threads(2)
    try:
        assert set(checks.over_cores(lambda _: threads(), range(3))) == {1}
        outer = checks.over_cores(lambda _: 0, range(2))
        next(outer)
        assert list(checks.over_cores(lambda _: threads(), range(1))) == [1]
        assert threads() == 1
        outer.close()  # type: ignore[attr-defined]
        assert threads() == 2
    finally:
        set_threads(before)
