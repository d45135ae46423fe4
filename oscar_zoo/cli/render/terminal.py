"""What people and programs see. Data goes to stdout, everything else to stderr; the same facts
either way.

Text that came from a file, a manifest or a hub passes `clean` before it reaches a terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from oscar_zoo.cli import streams
from oscar_zoo.errors import OscarZooError
from oscar_zoo.next_step import capitalized

NOT_REPORTED = "not reported"
_WIDEST = 4096
_DEEPEST = 30
"""Columns that further lines of a text are indented at most."""
_LINES = 25
"""Given beside a width, or a dumb terminal has 80 columns for rich and tables lose cells."""
MARKS = {
    "ok": "[green]ok[/]",
    "warning": "[yellow]warning[/]",
    "failed": "[red]FAILED[/]",
    "not checked": "not checked",
}


def out() -> Console:
    """Console of stdout, for data: never breaks a line or shortens a cell, so that what it shows
    can be copied."""
    return Console(width=_WIDEST, height=_LINES, soft_wrap=True, highlight=False)


def prose(text: str) -> None:
    """Print a sentence for people on stdout; on a terminal its lines break at words."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    for line in text.splitlines():
        out().print(clean(line))


def labelled(label: str, text: str, *, plain_label: str | None = None) -> None:
    """Print `text` behind a label on stdout; on a terminal, further lines begin below the text.

    Args:
        label: may hold markup; it ends with the spaces before the text.
        text: plain text.
        plain_label: `label` without its markup, where it has any.
    """
    first = len(label if plain_label is None else plain_label)
    lines, indent = [text], " " * min(first, _DEEPEST)
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        filled = textwrap.wrap(
            text,
            width,
            initial_indent=" " * first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines = (
            [filled[0][first:], *(line[len(indent) :] for line in filled[1:])] if filled else [""]
        )
    for start, line in zip((label, *[indent] * len(lines)), lines, strict=False):
        out().print(start + clean(line))


def fact(label: str, text: str) -> None:
    """Print one fact of `info`, below a heading."""
    labelled(f"  {label:<12} ", text)


def is_narrow(columns: int) -> bool:
    """Whether stdout is a terminal with fewer than `columns` columns."""
    return sys.stdout.isatty() and shutil.get_terminal_size().columns < columns


def err() -> Console:
    """Console of stderr, for everything that is not data; where it is no terminal, no cell is
    shortened."""
    width, height = (None, None) if sys.stderr.isatty() else (_WIDEST, _LINES)
    return Console(stderr=True, width=width, height=height, highlight=False, soft_wrap=True)


HIDDEN = ("Cc", "Cf", "Cs", "Co")
"""Categories of characters that do something else than to show themselves."""


def clean(text: object) -> str:
    """`text` without control and bidirectional characters, with rich markup escaped."""
    return escape(printable(text))


def printable(text: object) -> str:
    """`text` without control and bidirectional characters, for what is written without rich."""
    return "".join(c for c in str(text) if unicodedata.category(c) not in HIDDEN)


def emit_json(value: dict[str, Any]) -> None:
    """Print exactly one JSON object on stdout.

    Control and bidirectional characters, and those that it cannot encode, are `\\u` escapes.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    if not text.isascii() or "\x7f" in text:
        text = "".join(map(_visible, text))
    if not streams.can_write(text):
        text = json.dumps(value, indent=1, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _visible(character: str) -> str:
    """A character of a JSON text, as an escape where a terminal would act on it."""
    if character == "\x7f":
        return "\\u007f"  # ASCII for Python's writer
    if character.isascii() or unicodedata.category(character) not in (*HIDDEN, "Zl", "Zp"):
        return character
    return json.dumps(character)[1:-1]


def error_facts(error: OscarZooError) -> dict[str, Any]:
    """An error as JSON, for results of which some failed."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def print_error(code: str, message: str, hint: str | None, *, as_json: bool) -> None:
    """One line: cause and next step. With `--json` one object on stdout."""
    if as_json:
        facts = {"code": code, "message": message, "hint": hint}
        emit_json({"schema": "oscar-zoo.error/1", "error": facts})
        return
    err().print(error_line(message, hint))


def error_line(message: str, hint: str | None) -> str:
    """The line of an error, in rich markup: cause and next step."""
    line = f"[bold red]error:[/] {clean(message)}"
    if hint is None:
        return line
    stop = "" if message.endswith((".", "!", "?", ":")) else "."
    return f"{line}{stop} {clean(capitalized(hint))}"


def note(text: str, *, quiet: bool = False) -> None:
    """A line for people on stderr."""
    if not quiet:
        err().print(clean(text))


def table(*columns: str, right: tuple[int, ...] = ()) -> Table:
    """A plain table; `right` are the indexes of numeric columns."""
    result = _Listing(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for index, name in enumerate(columns):
        result.add_column(name, justify="right" if index in right else "left", no_wrap=True)
    return result


class _Listing(Table):
    """A table that becomes a block of lines per row on a terminal that is too narrow for it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = console.file.isatty() and shutil.get_terminal_size().columns
        if not narrow or Measurement.get(console, options, self).maximum <= narrow:
            yield from _without_trailing_space(super().__rich_console__(console, options))
            return
        names = [Text.from_markup(str(column.header)).plain for column in self.columns]
        column = max(len(name) for name in names[1:]) + 4 if len(names) > 1 else 0
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            yield Text.from_markup(str(cells[0]), style="bold")
            for name, cell in zip(names[1:], cells[1:], strict=True):
                lines = textwrap.wrap(
                    Text.from_markup(str(cell)).plain,
                    max(narrow - column, 1),
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                yield Text(
                    f"\n{' ' * column}".join(
                        [f"  {name}".ljust(column) + (lines or ["-"])[0], *lines[1:]]
                    )
                )


def _without_trailing_space(rendered: RenderResult) -> Iterator[Segment]:
    """The lines of a table without the spaces that fill its last column."""
    for line in Segment.split_lines(part for part in rendered if isinstance(part, Segment)):
        while line and not line[-1].text.rstrip():
            line.pop()
        if line:
            line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
        yield from line
        yield Segment.line()


def gigabytes(size: int) -> str:
    """`size` bytes for people, in GB; what is less than one in MB or kB."""
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else megabytes(size)


def megabytes(size: int) -> str:
    """`size` bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
