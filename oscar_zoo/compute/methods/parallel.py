"""Small factorizations, many at once: one thread each, one layer per worker.

Threads inside a 128 x 128 factorization cost more than they save, and their number changes its last
bits. With one thread each, a fit does not depend on the number of cores, and the same moments give
the same artifact.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
Arguments = TypeVar("Arguments")


def each_layer(function: Callable[[Arguments], T], layers: Sequence[Arguments]) -> list[T]:
    """`function` of every element of `layers`, in order; the first error is raised."""
    with (
        _one_thread_each(),
        ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), max(1, len(layers)))) as pool,
    ):
        return list(pool.map(function, layers))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
