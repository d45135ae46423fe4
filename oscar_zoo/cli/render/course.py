"""The state of a long piece of work: its phase, the count within the phase, and the share of all.

All phases are known at the start, with the share of the time that each is expected to take. So the
total never grows: a phase that is left out or ends early brings the end nearer. The pace is that of
the steps that have ended. One that goes on changes it only when it takes longer than they did, so
the time left does not climb between two steps. Nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from oscar_zoo.evaluate.shared import Phase, duration

EVERY_SECONDS = 30.0
"""Seconds between two lines about the same work where stderr is no terminal."""
MOST_BY_TIME = 0.9
"""Largest share of a phase that counts as done because of its expected time alone, in a phase that
counts nothing."""
PRIOR = 0.05
"""Weight of the estimate against what was measured, as a share of the whole estimate. It is small,
so that a machine that is slower than estimated shows early."""
LEAST_TO_TELL = 0.05
"""Share of all work that must be done before the time left is derived from it, where there was no
estimate."""


class Course:
    """A piece of work in progress: `phases` are all of them, in order; `timed` says that their
    seconds are an estimate for this machine, and not only shares."""

    def __init__(
        self, phases: Sequence[Phase], clock: Callable[[], float], *, timed: bool = True
    ) -> None:
        self.phases = tuple(phases)
        self._clock, self._timed = clock, timed
        self._places = {phase.name: place for place, phase in enumerate(phases)}
        self._expected = sum(phase.seconds for phase in phases) or 1.0
        self._before = [0.0, *accumulate(phase.seconds for phase in phases)]
        self._began = self._phase_began = clock()
        self._reached = 0.0
        self._measured = self._measured_expected = 0.0
        self._name, self._done, self._total = "", 0, 0
        self._first_done = self._longest_step = 0
        self._stepped = self._began

    def update(self, done: int, total: int, name: str) -> bool:
        """Take news of a phase, as `phases.Progress`; returns whether the phase has just begun."""
        began = name != self._name
        if began:
            self._measured, self._measured_expected = self._counted(ended=name in self._places)
            self._name, self._phase_began = name, self._clock()
            self._first_done, self._longest_step = done, 0
        elif done > self._done:
            self._longest_step = max(self._longest_step, done - self._done)
        if began or done != self._done:
            self._stepped = self._clock()
        self._done, self._total = done, total
        return began

    @property
    def name(self) -> str:
        """The phase, and its number among all phases."""
        place = self._places.get(self._name)
        return self._name if place is None else f"{self._name} ({place + 1} of {len(self.phases)})"

    @property
    def count(self) -> str:
        """How much of the phase is done, in its unit; empty in a phase that counts nothing."""
        if not self._total:
            return ""
        place = self._places.get(self._name)
        unit = "" if place is None else f" {self.phases[place].unit}"
        return f"{self._done:,} of {self._total:,}{unit}"

    @property
    def share(self) -> float:
        """How much of all work is done, 0 .. 1; it never falls."""
        place = self._places.get(self._name)
        if place is not None:
            seconds = self.phases[place].seconds
            done = self._before[place] + seconds * self._within(seconds)
            self._reached = max(self._reached, done / self._expected)
        return min(self._reached, 1.0)

    @property
    def percent(self) -> int:
        """`share` in percent, rounded down; at most 99 while anything is left to do."""
        last = self._name == self.phases[-1].name
        percent = int(100 * self.share + 1e-9)  # 0.29 * 100 is a little less than 29
        return percent if last and 0 < self._total == self._done else min(99, percent)

    @property
    def seconds_left(self) -> float | None:
        """How long it will take from now on; `None` where nobody can tell, or nothing is left."""
        share = self.share
        if self.percent == 100 or (not self._timed and share < LEAST_TO_TELL):
            return None
        step, waited = self._step, self._clock() - self._stepped
        pace = self._pace(share, step, waited)
        return (1 - share) * self._expected * pace - min(waited, step * pace)

    @property
    def left(self) -> str:
        """`seconds_left` in words; empty where it is `None`."""
        seconds = self.seconds_left
        return "" if seconds is None else f"about {duration(seconds)} left"

    @property
    def line(self) -> str:
        """Phase, count, percentage and time left in one line."""
        place = f"{self.name}: {self.count}" if self.count else self.name
        return ", ".join(part for part in (place, f"{self.percent} % of all", self.left) if part)

    def _pace(self, share: float, step: float, waited: float) -> float:
        """How often longer the work takes than it was expected to take.

        By the phases that count something: reading files, which counts nothing, says little about
        the rest. Where the expected seconds are only shares, by all of the work. `step` seconds are
        expected for the step that goes on, 0 in a phase that counts nothing; it began `waited`
        seconds ago.
        """
        if self._timed:
            prior = PRIOR * self._expected
            measured, expected = (one + prior for one in self._counted(ended=False))
        else:
            measured = self._clock() - self._began - (waited if step else 0.0)
            expected = share * self._expected
        pace = measured / expected
        slow = step > 0 and waited > step * pace
        return (measured + waited) / (expected + step) if slow else pace

    @property
    def _step(self) -> float:
        """Expected seconds of the step that goes on: as much as the longest one in this phase, or
        all that is left of it while none has ended."""
        place = self._places.get(self._name)
        if place is None or not self._total:
            return 0.0
        left = self._total - self._done
        return min(left, self._longest_step or left) / self._total * self.phases[place].seconds

    def _counted(self, *, ended: bool) -> tuple[float, float]:
        """The seconds that counted steps took, and those that were expected for them; `ended` says
        that the phase of now is over."""
        place = self._places.get(self._name)
        if place is None or not self._total:
            return self._measured, self._measured_expected
        until = self._clock() if ended else self._stepped
        done = (self._total if ended else self._done) - self._first_done
        return (
            self._measured + until - self._phase_began,
            self._measured_expected + done / self._total * self.phases[place].seconds,
        )

    def _within(self, seconds: float) -> float:
        if self._total:
            return self._done / self._total
        return min(MOST_BY_TIME, (self._clock() - self._phase_began) / seconds) if seconds else 0.0


class Rarely:
    """True once every `EVERY_SECONDS`, first that long after it was made or restarted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last = clock, clock()

    def __call__(self) -> bool:
        due = self._clock() - self._last >= EVERY_SECONDS
        if due:
            self.now()
        return due

    def now(self) -> None:
        self._last = self._clock()
