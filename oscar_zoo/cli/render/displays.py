"""How work in progress is shown on stderr: bars on a terminal, plain lines elsewhere.

There are two kinds of work. A course has phases that are known before it starts, so one bar shows
all of it. Other work is counted label by label, such as the bytes of every file that is fetched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from rich.console import RenderableType
from rich.progress import Task, TaskID

from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.bars import Bars, Row
from oscar_zoo.cli.render.course import Course, Rarely
from oscar_zoo.evaluate.phases import Phase, duration

Clock = Callable[[], float]


class Display(Protocol):
    """Shows one piece of work until it is closed."""

    def advance(self, label: str, done: int, total: int, unit: str) -> None:
        """See `oscar_zoo.app.progress.Observer`."""

    def say(self, line: RenderableType) -> None:
        """Print a line, or a table, without breaking what is shown."""

    def close(self) -> None:
        """Stop showing; what was drawn disappears, lines stay."""


def course_display(phases: Sequence[Phase], clock: Clock, *, timed: bool) -> Display:
    """The display of work whose phases are known."""
    course = Course(phases, clock, timed=timed)
    return CourseBar(course) if sys.stderr.isatty() else CourseLines(course, clock)


def count_display(clock: Clock) -> Display:
    """The display of work that is counted label by label."""
    return CountBars() if sys.stderr.isatty() else CountLines(clock)


class CourseLines:
    """A line for every phase but the first, and one every 30 seconds.

    Most mistakes are found in the first phase, and then the error is the only line.
    """

    def __init__(self, course: Course, clock: Clock) -> None:
        self._course, self._rarely = course, Rarely(clock)

    def advance(self, label: str, done: int, total: int, unit: str) -> None:
        """See `Display`."""
        first = not self._course.name
        began = self._course.update(done, total, label)
        if (began and not first) or self._rarely():
            self._rarely.now()
            self.say(terminal.clean(self._course.line))

    def say(self, line: RenderableType) -> None:
        """See `Display`."""
        terminal.err().print(line)

    def close(self) -> None:
        """See `Display`."""


class CountLines:
    """A line every 30 seconds, and one for every new label whose seconds are counted."""

    def __init__(self, clock: Clock) -> None:
        self._rarely, self._waited_for = Rarely(clock), ""

    def advance(self, label: str, done: int, total: int, unit: str) -> None:
        """See `Display`."""
        waiting = not total and unit == "s"
        new = waiting and label != self._waited_for
        if waiting:
            self._waited_for = label
        if new:
            self._rarely.now()
        if new or ((total or waiting) and self._rarely()):
            count = f" ({done} s)" if waiting else f": {count_text(done, total, unit)}"
            self.say(terminal.clean(label + count))

    def say(self, line: RenderableType) -> None:
        """See `Display`."""
        terminal.err().print(line)

    def close(self) -> None:
        """See `Display`."""


class _Bars:
    """What both displays on a terminal share."""

    def __init__(self, rows: Callable[[Sequence[Task]], Sequence[Row]]) -> None:
        self._bars = Bars(rows, terminal.err())
        self._bars.start()

    def say(self, line: RenderableType) -> None:
        """See `Display`."""
        self._bars.console.print(line)

    def close(self) -> None:
        """See `Display`."""
        self._bars.stop()


class CourseBar(_Bars):
    """One bar for all phases, with the name and the count of the current one."""

    def __init__(self, course: Course) -> None:
        self._course = course
        super().__init__(
            lambda tasks: [Row(course.name, course.count, course.left, course.share, 1.0)]
        )

    def advance(self, label: str, done: int, total: int, unit: str) -> None:
        """See `Display`."""
        self._course.update(done, total, label)


class CountBars(_Bars):
    """A bar per label; one without a total moves on its own until another label begins."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskID] = {}
        super().__init__(lambda tasks: [_counted(task) for task in tasks])

    def advance(self, label: str, done: int, total: int, unit: str) -> None:
        """See `Display`."""
        if label not in self._tasks:
            for task in [task.id for task in self._bars.tasks if task.total is None]:
                self._bars.remove_task(task)
            self._tasks[label] = self._bars.add_task(
                terminal.printable(label), total=total or None, count=""
            )
        task_id = self._tasks[label]
        if task_id in self._bars.task_ids and (total or unit):
            count = count_text(done, total, unit)
            self._bars.update(task_id, completed=done, total=total or None, count=count)


def count_text(done: int, total: int, unit: str) -> str:
    """`3 of 8 tokens`, `1.2 MB of 8.0 MB`, or `12 s` where no total is known."""
    if unit == "bytes":
        return f"{terminal.megabytes(done)} of {terminal.megabytes(total)}"
    return (f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}").rstrip()


def _counted(task: Task) -> Row:
    """The line of a label; without a time left while it is unknown."""
    left = None if task.finished else task.time_remaining
    told = "" if left is None else f"about {duration(left)} left"
    return Row(task.description, task.fields["count"], told, task.completed, task.total)
