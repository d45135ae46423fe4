"""The observer of the command line: progress, remarks and questions of a use case, on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Self

import click

from oscar_zoo.app.progress import Note
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.displays import Clock, Display, count_display, course_display
from oscar_zoo.cli.render.notes import lines_of, question_of
from oscar_zoo.evaluate.phases import Phase

_TOLD = "oscar_zoo.told"
"""Where click keeps the remarks that a command line has printed."""


class TerminalObserver:
    """An `app.progress.Observer` that people read.

    Use it as a context manager: its bars end with the block, before results are printed. A remark
    is printed once per command line. Where stderr is no terminal, long work prints a line for every
    phase and one every 30 seconds.

    Args:
        quiet: print neither progress nor remarks; a question is still asked.
        as_json: print no remarks, and progress on a terminal only; ask nothing.
        clock: seconds.
    """

    def __init__(
        self, *, quiet: bool = False, as_json: bool = False, clock: Clock = time.monotonic
    ) -> None:
        self._as_json, self._clock = as_json, clock
        self._no_remarks = quiet or as_json
        self._no_progress = quiet or (as_json and not sys.stderr.isatty())
        self._display: Display | None = None
        self._lock = threading.RLock()
        context = click.get_current_context(silent=True)
        self._told: set[str] = context.meta.setdefault(_TOLD, set()) if context else set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin(self, phases: Sequence[Phase], *, timed: bool) -> None:
        """See `Observer`; without phases, what is shown ends."""
        if self._no_progress:
            return
        with self._lock:
            self.close()
            if phases:
                self._display = course_display(phases, self._clock, timed=timed)

    def advance(self, label: str, done: int, total: int, unit: str = "") -> None:
        """See `Observer`."""
        if self._no_progress:
            return
        with self._lock:
            if self._display is None:
                self._display = count_display(self._clock)
            self._display.advance(label, done, total, unit)

    def note(self, note: Note) -> None:
        """See `Observer`."""
        with self._lock:
            if self._no_remarks or note.text in self._told:
                return
            self._told.add(note.text)
            say = self._display.say if self._display else terminal.err().print
            for line in lines_of(note):
                say(line)

    def confirm(self, question: Note) -> bool:
        """See `Observer`; asks on a terminal only."""
        with self._lock:
            self.close()
            if self._as_json or not can_ask():
                return False
            return click.confirm(terminal.printable(question_of(question)), default=True, err=True)

    def close(self) -> None:
        """End what is shown."""
        with self._lock:
            display, self._display = self._display, None
            if display is not None:
                display.close()


def can_ask() -> bool:
    """Whether somebody at a terminal can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()
