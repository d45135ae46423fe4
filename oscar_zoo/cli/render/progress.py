"""Progress, remarks and questions of a use case on stderr: bars on a terminal, lines elsewhere.

There are two kinds of work. A course has phases that are known before it starts, so one bar shows
all of it. Other work is counted label by label, such as the bytes of every file that is fetched.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import click
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from oscar_zoo.cli.render import computing, terminal
from oscar_zoo.cli.render.computing import choice_lines
from oscar_zoo.cli.render.course import Course, Rarely
from oscar_zoo.evaluate.shared import Phase, duration
from oscar_zoo.observer import Note

Clock = Callable[[], float]
LEAST_FOR_BAR = 100
"""Columns of a terminal below which a line has no bar, so that its count and time left stay."""
_TOLD = "oscar_zoo.told"
"""Where click keeps the remarks that a command line has printed."""


class TerminalObserver:
    """An `oscar_zoo.observer.Observer` that people read.

    As a context manager its bars end with the block, before results are printed. A remark is
    printed once per command line. `quiet` leaves out progress and remarks, but asks; `as_json`
    leaves out remarks, shows progress on a terminal only, and asks nothing.
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
        """Without phases, what is shown ends."""
        if self._no_progress:
            return
        with self._lock:
            self.close()
            if phases:
                course = Course(phases, self._clock, timed=timed)
                on_terminal = sys.stderr.isatty()
                self._display = CourseBar(course) if on_terminal else Lines(self._clock, course)

    def advance(self, label: str, done: int, total: int, unit: str = "") -> None:
        if self._no_progress:
            return
        with self._lock:
            if self._display is None:
                self._display = CountBars() if sys.stderr.isatty() else Lines(self._clock)
            self._display.advance(label, done, total, unit)

    def note(self, note: Note) -> None:
        with self._lock:
            if self._no_remarks or note.text in self._told:
                return
            self._told.add(note.text)
            say = self._display.say if self._display else terminal.err().print
            for line in lines_of(note):
                say(line)

    def confirm(self, question: Note) -> bool:
        """Asks on a terminal only."""
        with self._lock:
            self.close()
            if self._as_json or not can_ask():
                return False
            return click.confirm(terminal.printable(question_of(question)), default=True, err=True)

    def close(self) -> None:
        with self._lock:
            display, self._display = self._display, None
            if display is not None:
                display.close()


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def lines_of(note: Note) -> list[RenderableType]:
    if note.code == "compute.choice":
        return choice_lines(note.facts["choice"])
    if note.code == "server.failed":
        return [terminal.error_line(note.text, note.facts["hint"])]
    text = note.text
    if note.code == "compute.start":
        text = f"{text.removesuffix('.')}: {computing.plan_sentence(note.facts)}"
    return [terminal.clean(text if note.kind == "step" else f"{note.kind}: {text}")]


def question_of(note: Note) -> str:
    if note.code == "compute.question":
        return f"{note.text.removesuffix('?')} ({computing.about(note.facts['seconds'])})?"
    return note.text


class Display(Protocol):
    """Shows one piece of work until it is closed."""

    def advance(self, label: str, done: int, total: int, unit: str) -> None: ...

    def say(self, line: RenderableType) -> None:
        """Print a line, or a table, without breaking what is shown."""

    def close(self) -> None: ...


class Lines:
    """A line every 30 seconds, and one for every new phase of a course, or for every new label
    whose seconds are counted.

    The first phase of a course has none: most mistakes are found there, and then the error is the
    only line.
    """

    def __init__(self, clock: Clock, course: Course | None = None) -> None:
        self._course, self._rarely, self._waited_for = course, Rarely(clock), ""

    def advance(self, label: str, done: int, total: int, unit: str) -> None:
        if self._course is not None:
            first = not self._course.name
            new, told = self._course.update(done, total, label) and not first, True
            text = self._course.line
        else:
            waiting = not total and unit == "s"
            new, told = waiting and label != self._waited_for, bool(total) or waiting
            text = label + (f" ({done} s)" if waiting else f": {count_text(done, total, unit)}")
            self._waited_for = label if waiting else self._waited_for
        if new or (told and self._rarely()):
            self._rarely.now()
            self.say(terminal.clean(text))

    def say(self, line: RenderableType) -> None:
        terminal.err().print(line)

    def close(self) -> None:
        """Lines stay."""


class _Told(ProgressColumn):
    """A field of a task as it is; `cut` where a narrow terminal has no room for all of it."""

    def __init__(self, field: str, *, cut: bool = False) -> None:
        super().__init__(Column(no_wrap=not cut, min_width=4 if cut else None))
        self._field, self._cut = field, cut

    def render(self, task: Task) -> Text:
        text = task.fields[self._field]
        told = text(task) if callable(text) else text
        return Text(told, no_wrap=True, overflow="ellipsis" if self._cut else "ignore")


class _Bar(BarColumn):
    """A bar whose task may say its share by itself, as it moves with time."""

    def render(self, task: Task) -> ProgressBar:
        if "share" in task.fields:
            task.completed = task.fields["share"]()
        return super().render(task)


class _Bars:
    """What both displays on a terminal share."""

    def __init__(self) -> None:
        console = terminal.err()
        bar = [_Bar(24)] if console.width >= LEAST_FOR_BAR else []
        columns = _Told("label", cut=True), *bar, _Told("count"), _Told("left")
        self._bars = Progress(*columns, console=console, transient=True)
        self._bars.start()
        self.say, self.close = self._bars.console.print, self._bars.stop


class CourseBar(_Bars):
    """One bar for all phases, with the name and the count of the current one."""

    def __init__(self, course: Course) -> None:
        super().__init__()
        self._course = course
        told: dict[str, Any] = {"label": "", "count": "", "left": lambda task: course.left}
        told["share"] = lambda: course.share
        self._task = self._bars.add_task("", total=1.0, **told)

    def advance(self, label: str, done: int, total: int, unit: str) -> None:
        self._course.update(done, total, label)
        label = f"  {terminal.printable(self._course.name)}"
        self._bars.update(self._task, label=label, count=self._course.count)


class CountBars(_Bars):
    """A bar per label; one without a total moves on its own until another label begins."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: dict[str, TaskID] = {}

    def advance(self, label: str, done: int, total: int, unit: str) -> None:
        if label not in self._tasks:
            for task in [task.id for task in self._bars.tasks if task.total is None]:
                self._bars.remove_task(task)
            shown = f"  {terminal.printable(label)}"
            told: dict[str, Any] = {"label": shown, "count": "", "left": _time_left}
            self._tasks[label] = self._bars.add_task("", total=total or None, **told)
        task_id = self._tasks[label]
        if task_id in self._bars.task_ids and (total or unit):
            count = count_text(done, total, unit)
            self._bars.update(task_id, completed=done, total=total or None, count=count)


def count_text(done: int, total: int, unit: str) -> str:
    """`3 of 8 tokens`, `1.2 MB of 8.0 MB`, or `12 s` where no total is known."""
    if unit == "bytes":
        return f"{terminal.megabytes(done)} of {terminal.megabytes(total)}"
    return (f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}").rstrip()


def _time_left(task: Task) -> str:
    left = None if task.finished else task.time_remaining
    return "" if left is None else f"about {duration(left)} left"
