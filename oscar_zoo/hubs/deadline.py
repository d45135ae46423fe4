"""Calls that end in time, whatever the network does.

Time limits of sockets do not bound a call: names are resolved without one, and a byte now and then
keeps a read alive for ever. So the call runs in a daemon thread, which is abandoned when its time
is over; it cannot keep the process from ending. Whoever waits here can be interrupted at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
TICK = 0.1
"""Seconds between two looks at the clock."""


class Patience:
    """A budget of seconds to wait for a hub. Threads may share it; somebody must `wait` for its
    clock to go on. A longer gap between two looks at the clock does not count: the process was
    stopped, and heard nothing however fast the hub answered."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._spent = self._lost = 0.0

    @property
    def spent(self) -> float:
        """Seconds that counted so far."""
        with self._lock:
            now = time.monotonic()
            gap = now - self._last
            lost = max(0.0, gap - 2 * TICK)
            self._last = now
            self._lost += lost
            self._spent += gap - lost
            return self._spent

    @property
    def lost(self) -> float:
        """Seconds that did not count so far."""
        return self._lost

    @property
    def left(self) -> float:
        """Seconds of the budget that are left; zero or less when it is over."""
        return self.seconds - self.spent

    def wait(self, done: threading.Event, most: float) -> bool:
        """Whether `done` is set within `most` seconds."""
        start = self.spent
        while not done.wait(TICK):
            if self.spent - start >= most:
                return done.is_set()
        return True


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


def within(
    seconds: float,
    call: Callable[[], T],
    *,
    error: Callable[[], Exception],
    patience: Patience | None = None,
) -> T:
    """Return what `call` returns, or raise what it raises, unless it takes longer than `seconds`.

    Args:
        seconds: how long to wait; zero or less raises at once.
        call: runs in a thread of its own. When time is over it goes on there unobserved: it must do
            no harm later.
        patience: whose clock counts the seconds, where `call` is a part of something longer.
    """
    if seconds <= 0:
        raise error()
    outcome = _Outcome(call)
    done = threading.Event()

    def run() -> None:
        outcome.run()
        done.set()

    threading.Thread(target=run, name="oscar-zoo-call", daemon=True).start()
    if not (patience or Patience(seconds)).wait(done, seconds):
        raise error()
    return outcome.get()


def in_parallel(calls: Sequence[Callable[[], T]], *, workers: int = 4) -> list[T]:
    """Run `calls` on daemon threads and return their results in the order of `calls`.

    The first exception is raised as soon as it happens; calls that run then go on unobserved,
    others never start. The same holds for an interrupt of the thread that waits.

    Args:
        workers: how many run at a time, at most.
    """
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
