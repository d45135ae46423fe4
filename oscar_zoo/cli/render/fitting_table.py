"""A table that fits its terminal: it loses columns it can spare, or becomes blocks of lines."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

WIDEST = 4096
"""Columns of a console that never shortens a cell."""
NOT_REPORTED = "not reported"
_NO_VALUE = ("", "-", NOT_REPORTED)


class FittingTable(Table):
    """A table that becomes a block of lines per row on a terminal that is too narrow for it.

    Before that it loses columns if it has columns to spare: first all without a value in any row,
    then those of `spare`, group by group. Blocks show every value. `columns` are heads, of which a
    column may have none."""

    def __init__(
        self, *columns: str, right: Sequence[int] = (), spare: Sequence[Sequence[str]] = ()
    ) -> None:
        super().__init__(box=None, pad_edge=False, header_style="bold", show_edge=False)
        self._spare = spare
        for index, name in enumerate(columns):
            self.add_column(name, justify="right" if index in right else "left", no_wrap=True)

    def shows(self, head: str, console: Console) -> bool:
        """Whether the column `head` is shown on a console, or its values in blocks."""
        fitting = self._fitting(console, console.options)
        return head in map(_head, (fitting or self).columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitting = self._fitting(console, options)
        if fitting is None:
            yield from self._blocks(_room(console, options))
        else:
            rendered = super(FittingTable, fitting).__rich_console__(console, options)
            yield from _without_trailing_space(rendered)

    def _fitting(self, console: Console, options: ConsoleOptions) -> FittingTable | None:
        """This table, or as much of it as fits; `None` where rows have to be blocks."""
        room = _room(console, options)
        endless = options.update(width=WIDEST)
        for table in self._narrower():
            if Measurement.get(console, endless, table).maximum <= room:
                return table
        return None

    def _narrower(self) -> Iterator[FittingTable]:
        """This table, then with fewer and fewer columns."""
        yield self
        if not self._spare:
            return
        kept = [column for column in self.columns if not set(_texts(column)) <= set(_NO_VALUE)]
        yield self._of(kept)
        for group in self._spare:
            kept = [column for column in kept if _head(column) not in group]
            yield self._of(kept)

    def _of(self, columns: Sequence[Column]) -> FittingTable:
        """This table with some of its columns only."""
        part = copy(self)
        part.columns = [replace(column, _index=at) for at, column in enumerate(columns)]
        return part

    def _blocks(self, room: int) -> Iterator[Text]:
        """A block of lines per row, in `room` columns."""
        others = self.columns[1:]
        indent = max((len(_head(column)) for column in others), default=0) + 4
        hidden = _NO_VALUE if self._spare else ("",)
        for start, *texts in zip(*map(_texts, self.columns), strict=True):
            yield Text(start, style="bold")
            for column, text in zip(others, texts, strict=True):
                if text in hidden:
                    continue
                lines = textwrap.wrap(
                    text, max(room - indent, 1), break_long_words=False, break_on_hyphens=False
                )
                label = f"  {_head(column)}".ljust(indent)
                yield Text(label + f"\n{' ' * indent}".join(lines))


def _room(console: Console, options: ConsoleOptions) -> int:
    """Columns of the terminal that a console writes to; as good as endless elsewhere."""
    if not console.file.isatty():
        return WIDEST
    return min(options.max_width, console.width) if console.width < WIDEST else _of_stdout()


def _of_stdout() -> int:
    return shutil.get_terminal_size().columns or WIDEST


def _head(column: Column) -> str:
    return Text.from_markup(str(column.header)).plain


def _texts(column: Column) -> list[str]:
    """The cells of a column without markup."""
    return [Text.from_markup(str(cell)).plain for cell in column.cells]


def _without_trailing_space(rendered: RenderResult) -> Iterator[Segment]:
    """The lines of a table without the spaces that fill its last column."""
    for line in Segment.split_lines(part for part in rendered if isinstance(part, Segment)):
        while line and not line[-1].text.rstrip():
            line.pop()
        if line:
            line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
        yield from line
        yield Segment.line()
