"""How long a hub is waited for, in seconds that count: those in which it could have been heard.

A process that is stopped, or that waits for a processor beside many others, hears nothing, however
fast the hub answers. Such time is told from silence and not held against the hub:

- a gap between two looks at the clock, when the process was stopped or its threads came late;
- the time that threads of this process were ready to run and did not, as Linux counts it. Some of
  every second counts all the same, so that a silent hub ends the wait of a process whose other
  threads are always starved.

A hub on this machine is starved together with us, and its own waiting cannot be seen. Before such a
hub counts as silent, a short calculation shows how much slower than usual this machine is, and the
limits grow by that factor.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

TICK = 0.1
"""Seconds between two looks at the clock."""
MAX_SLOWDOWN = 16.0
"""Limits grow by this factor at most where processors are scarce."""
_PROBE_SECONDS = 0.005
_PROBE_AGE = 1.0
_TASKS = Path("/proc/self/task")


class Patience:
    """A budget of seconds to wait for a hub. Threads may share it; somebody must `wait` for its
    clock to go on.

    Args:
        seconds: the budget.
        nearby: whether the hub is on this machine.
    """

    def __init__(self, seconds: float, *, nearby: bool = False) -> None:
        self.seconds = seconds
        self._nearby = nearby
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._delays = run_delays()
        self._spent = self._lost = 0.0
        self._slowdown, self._probed = 1.0, float("-inf")

    @property
    def spent(self) -> float:
        """Seconds that counted so far."""
        with self._lock:
            now, delays = time.monotonic(), run_delays()
            gap = max(0.0, now - self._last)
            starved = sum(
                max(0.0, delay - self._delays.get(task, 0.0)) for task, delay in delays.items()
            )
            lost = max(0.0, gap - 2 * TICK, min(starved, gap * (1 - 1 / MAX_SLOWDOWN)))
            self._last, self._delays = now, delays
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
        return self.seconds * self.slowdown(self.spent >= self.seconds) - self.spent

    def wait(self, done: threading.Event, most: float) -> bool:
        """Wait for `done`, `most` seconds at most.

        Returns:
            Whether `done` was set.
        """
        start, was_over = self.spent, False
        while not done.wait(TICK):
            spent = self.spent - start
            is_over = spent >= most and spent >= most * self.slowdown(True)
            if (
                is_over and was_over
            ):  # a look later: a thread that was about to hear something has run by then
                return False
            was_over = is_over
        return True

    def slowdown(self, measure: bool) -> float:
        """How much slower than usual this machine is, for a hub that is on it; 1 for any other.

        Args:
            measure: whether to look again, which takes a few milliseconds; else the last known
                value.
        """
        if self._nearby and measure and time.monotonic() - self._probed > _PROBE_AGE:
            self._slowdown = max(self._slowdown, min(machine_slowdown(), MAX_SLOWDOWN))
            self._probed = time.monotonic()
        return self._slowdown


def run_delays() -> dict[str, float]:
    """Seconds that each thread of this process has been ready to run without running; empty where
    nobody counts."""
    delays: dict[str, float] = {}
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        return delays
    for task in tasks:
        try:
            delays[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    return delays


def machine_slowdown() -> float:
    """How many times longer than alone a few milliseconds of calculation take now; at least 1."""
    start, worked = time.monotonic(), time.thread_time()
    while time.thread_time() - worked < _PROBE_SECONDS:
        pass
    return max(1.0, (time.monotonic() - start) / _PROBE_SECONDS)
