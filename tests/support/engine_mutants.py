"""Deliberate bugs that only forked workers can have, because they are made here and not in the
package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def install(name: str) -> None:
    """Put the bug `name` into this process and the ones it forks."""
    {"no_ring_start": no_ring_start, "clip_one_rank_lower": clip_one_rank_lower}[name]()


def no_ring_start() -> None:
    """A query takes its whole window from the ring, also what an earlier owner of the row wrote."""
    from oscar_zoo.runtime import window_store

    real: Callable[..., Any] = window_store.coverage

    @functools.wraps(real)
    def coverage(length: int, **given: Any) -> Any:
        return real(length, **{**given, "ring_start": 0})

    window_store.coverage = coverage


def clip_one_rank_lower() -> None:
    """The threshold is the element below the one that the specification names."""
    from oscar_kernels.spec import QuantSpec

    real = QuantSpec.clip_index
    assert isinstance(real, property) and real.fget is not None
    QuantSpec.clip_index = property(lambda spec: real.fget(spec) - 1)
