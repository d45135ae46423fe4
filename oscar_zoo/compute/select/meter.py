"""Progress of the measurements of `auto`."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.evaluate.shared import Progress


@dataclass
class Meter:
    """Progress over several phases.

    The total of each phase is known when it starts, and may not be reached.
    """

    progress: Progress
    phase: str = ""
    total: int = 0
    done: int = 0
    share: int = 1

    def start(self, phase: str, total: int, *, share: int = 1) -> None:
        """Begin a phase of `total` units, each done after `share` ticks."""
        self.phase, self.total, self.done, self.share = phase, total, 0, share
        if total:
            self.progress(0, total, phase)

    def tick(self) -> None:
        """Count one share of a unit."""
        self.done += 1
        self.at(self.done // self.share, self.total)

    def at(self, done: int, total: int) -> None:
        """Report that `done` units are finished."""
        self.progress(min(done, total), total, self.phase)
