"""Progress of a long piece of work on stderr: one bar for all of it, or plain lines where nobody
watches a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import Progress as Bars
from rich.progress import ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.text import Text

from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.course import Course, Rarely
from oscar_zoo.evaluate.phases import Phase, Progress


@dataclass(frozen=True)
class Shown:
    """Takes news of a piece of work, as `phases.Progress`, and remarks that must not break its
    bar."""

    tell: Progress
    note: Callable[[str], None]

    def __call__(self, done: int, total: int, phase: str) -> None:
        self.tell(done, total, phase)


@contextmanager
def course(
    phases: Sequence[Phase],
    *,
    timed: bool,
    enabled: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Shown]:
    """One bar for work of known phases, on stderr; lines, for each phase but the first and every
    30 seconds, where nobody watches.

    Args:
        phases: all of them, in order.
        timed: whether their seconds are an estimate for this machine.
        enabled: whether to show anything.
        clock: seconds.
    """
    if not enabled:
        yield Shown(lambda done, total, phase: None, lambda text: None)
        return
    way = Course(phases, clock, timed=timed)
    if not sys.stderr.isatty():
        rarely = Rarely(clock)

        def tell(done: int, total: int, phase: str) -> None:
            first = (
                not way.name
            )  # what fails in the first phase, as most mistakes do, stays one line
            if (way.update(done, total, phase) and not first) or rarely():
                rarely.now()
                terminal.note(way.line)

        yield Shown(tell, terminal.note)
        return
    columns = (
        _OfCourse(lambda: f"  {way.name:<22}"),
        _CourseBar(way),
        _OfCourse(lambda: f"{way.count:>26}"),
    )
    with Bars(
        *columns, _OfCourse(lambda: way.left), console=terminal.err(), transient=True
    ) as bars:
        bars.add_task("", total=None)

        def update(done: int, total: int, phase: str) -> None:
            way.update(done, total, phase)

        yield Shown(update, lambda text: bars.console.print(terminal.clean(text)))


class _OfCourse(ProgressColumn):
    """What is true when it is drawn."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        super().__init__()

    def render(self, task: Task) -> Text:
        """See `ProgressColumn`."""
        return Text(self._text())


class _CourseBar(ProgressColumn):
    """How much of everything is done."""

    def __init__(self, way: Course) -> None:
        self._way = way
        super().__init__()

    def render(self, task: Task) -> ProgressBar:
        """See `ProgressColumn`."""
        return ProgressBar(total=1.0, completed=self._way.share, width=24)
