"""Work on many matrices over all cores: one matrix per thread, and BLAS with one thread for each.

The threads of OpenBLAS wait for each other by spinning. For matrices of 128 channels that costs
more processor time than the products, and on a busy machine several times as much.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

MAX_WORKERS = 4
"""Threads that work at once; each holds the intermediate results of one layer."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_lock = threading.Lock()
_holders = 0
_before = 1


def over_cores(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """The results of `function` for `items`, in their order.

    Work that was not begun is dropped when the caller stops early.
    """
    with _one_blas_thread(), ThreadPoolExecutor(_workers()) as pool:
        yield from pool.map(function, items)


def _workers() -> int:
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0))))


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Let OpenBLAS use one thread per call until the last holder is done."""
    global _holders, _before
    blas = _openblas()
    if blas is None:
        yield
        return
    get, set_threads = blas
    with _lock:
        if _holders == 0:
            _before = get()
            set_threads(1)
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0:
                set_threads(_before)


@lru_cache(maxsize=1)
def _openblas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """How to read and set the threads of numpy's own OpenBLAS; `None` for another BLAS."""
    folder = Path(np.__file__).parent.with_name("numpy.libs")
    for path in sorted(folder.glob("lib*openblas*")):
        for prefix in ("scipy_openblas", "openblas"):
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(str(path))  # loaded by numpy already: the same one
                get, set_threads = (
                    getattr(library, f"{prefix}_{verb}_num_threads64_") for verb in ("get", "set")
                )
                get.restype, set_threads.argtypes = ctypes.c_int, [ctypes.c_int]
                return get, set_threads
    return None
