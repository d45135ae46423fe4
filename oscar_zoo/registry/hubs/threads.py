"""Calls on daemon threads: several at a time, or one that has to end in time.

An abandoned call goes on unobserved, must do no harm later, and cannot keep the process from
ending. Whoever waits here can be interrupted at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class _Outcome(Generic[T]):
    """What `call` returned or raised: `run` is for a thread, `get` for whoever waits."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> bool:
        """Whether the call returned."""
        try:
            self._value.append(self._call())
        except BaseException as error:  # raised again by `get`, in the thread that waits
            self._error = error
            return False
        return True

    def get(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # the traceback holds this object: no cycle
        return self._value[0]


def within(seconds: float, call: Callable[[], T], *, error: Callable[[], Exception]) -> T:
    """What `call` returns or raises, unless it takes longer than `seconds`; nothing is called
    where there are none."""
    if seconds <= 0:
        raise error()
    outcome = _Outcome(call)
    done = threading.Event()

    def run() -> None:
        outcome.run()
        done.set()

    threading.Thread(target=run, name="oscar-zoo-call", daemon=True).start()
    if not done.wait(seconds):
        raise error()
    return outcome.get()


def in_parallel(calls: Sequence[Callable[[], T]], *, workers: int = 4) -> list[T]:
    """Run `calls`, at most `workers` at a time, and return their results in the order of `calls`.

    The first exception is raised as soon as it happens; calls that run then go on unobserved,
    others never start. The same holds for an interrupt of the thread that waits."""
    outcomes = [_Outcome(call) for call in calls]
    waiting = iter(outcomes)
    finished: SimpleQueue[_Outcome[T]] = SimpleQueue()
    taking = threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with taking:
                outcome = next(waiting, None)
            if outcome is None:
                return
            if not outcome.run():
                stopped.set()
            finished.put(outcome)

    try:
        for _ in range(min(workers, len(outcomes))):
            threading.Thread(target=work, name="oscar-zoo-worker", daemon=True).start()
        for _ in outcomes:
            finished.get().get()
    finally:
        stopped.set()
    return [outcome.get() for outcome in outcomes]
