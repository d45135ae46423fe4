"""Bars of work in progress: a line per piece of work, never longer than the terminal is wide.

Where there is little room, the bar becomes short first, then it goes, and then the label is cut.
The count and the time left stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LABEL, BAR, COUNT, LEFT = 22, 24, 22, 21
"""Columns of each part where there is room; the longest time left is `about 90 minutes left`."""
LEAST_BAR, LEAST_LABEL = 6, 4
CUT = "..."


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        label: what is being done.
        count: how much of it is done, in words.
        left: the time left in words; empty while it is unknown.
        done, total: the share that the bar shows; it moves on its own without a total.
    """

    label: str
    count: str
    left: str
    done: float
    total: float | None


@dataclass(frozen=True)
class Widths:
    """Columns of the parts of a line; a bar of 0 is left out."""

    label: int
    bar: int
    count: int
    left: int

    @classmethod
    def of(cls, rows: Sequence[Row], columns: int) -> Widths:
        """Widths with which the longest of `rows`, an indent of two and the gaps fill at most
        `columns`, as long as count, time left and a few letters fit at all."""
        label = max((len(row.label) for row in rows), default=0)
        count = max((len(row.count) for row in rows), default=0)
        left = LEFT if any(row.left for row in rows) else 0
        room = columns - 2 - (1 + left)
        for wide, bar, counted in (
            (max(label, LABEL), BAR, max(count, COUNT)),
            (label, BAR, count),
            (label, LEAST_BAR, count),
        ):
            spare = room - (wide + 1 + bar + 1 + counted)
            if spare >= 0:
                return cls(wide, min(BAR, bar + spare), counted, left)
        return cls(max(LEAST_LABEL, min(label, room - count - 1)), 0, count, left)


class Bars(Progress):
    """Rich's live display with our lines.

    Args:
        rows: one line for each of the tasks that it gets.
    """

    def __init__(self, rows: Callable[[Sequence[Task]], Sequence[Row]], console: Console) -> None:
        self._rows, self._screen = rows, console  # drawn from the constructor on
        super().__init__(console=console, transient=True)

    def make_tasks_table(self, tasks: Sequence[Task]) -> Table:  # type: ignore[override]
        """See `Progress`."""
        rows = self._rows(tasks)
        widths = Widths.of(rows, self._screen.width)
        table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        for _ in range(4 if widths.bar else 3):
            table.add_column(no_wrap=True)
        for row in rows:
            bar = [_bar(row, widths.bar)] if widths.bar else []
            label = f"  {_cut(row.label, widths.label):<{widths.label}}"
            table.add_row(Text(label), *bar, Text(f"{row.count:>{widths.count}}"), Text(row.left))
        return table


def _bar(row: Row, width: int) -> ProgressBar:
    return ProgressBar(total=row.total, completed=row.done, width=width)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(1, width - len(CUT))] + CUT
