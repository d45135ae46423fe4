"""Calls on daemon threads: several at a time, or one that has to end in time.

An abandoned call goes on unobserved, must do no harm later, and cannot keep the process from
ending. Whoever waits here can be interrupted at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], *, error: Callable[[], Exception]) -> T:
    """What `call` returns or raises, unless it takes longer than `seconds`; nothing is called
    where there are none."""
    if seconds <= 0:
        raise error()
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(call, future), daemon=True).start()
    if not wait([future], seconds).done:
        raise error()
    return future.result()


def in_parallel(calls: Sequence[Callable[[], T]], *, workers: int = 4) -> list[T]:
    """The results of `calls`, at most `workers` at a time. The first exception, or an interrupt of
    the thread that waits, is raised at once; calls that run then go on unobserved."""
    futures: list[Future[T]] = [Future() for _ in calls]
    waiting = iter(list(zip(calls, futures, strict=True)))
    taking, stopped = threading.Lock(), threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with taking:
                task = next(waiting, None)
            if task is None:
                return
            _run(*task)
            if task[1].exception() is not None:
                stopped.set()

    try:
        for _ in range(min(workers, len(futures))):
            threading.Thread(target=work, daemon=True).start()
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
    finally:
        stopped.set()
    return [future.result() for future in futures]


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised again in the thread that waits
        future.set_exception(error)
