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
from typing import Any

from rich.console import Console
from rich.markup import escape

from oscar_zoo.cli import streams
from oscar_zoo.cli.render import fitting_table
from oscar_zoo.cli.render.fitting_table import WIDEST
from oscar_zoo.errors import OscarZooError
from oscar_zoo.next_step import capitalized

NOT_REPORTED, table = fitting_table.NOT_REPORTED, fitting_table.FittingTable
_DEEPEST = 30
"""Columns that further lines of a text are indented at most."""
_LINES = 25
"""Given beside a width, or a dumb terminal has 80 columns for rich and tables lose cells."""
NOTES = [True]
"""Whether the command that runs shows notes, last."""
MARKS = {
    "ok": "[green]ok[/]",
    "warning": "[yellow]warning[/]",
    "failed": "[red]FAILED[/]",
    "not checked": "not checked",
}


def out() -> Console:
    """Console of stdout, for data: never breaks a line or shortens a cell, so that what it shows
    can be copied."""
    return Console(width=WIDEST, height=_LINES, soft_wrap=True, highlight=False)


def prose(text: str) -> None:
    """Print a sentence for people on stdout; on a terminal its lines break at words."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    for line in text.splitlines():
        out().print(clean(line))


def labelled(label: str, text: str, *, plain_label: str | None = None) -> None:
    """Print `text` behind a label on stdout; on a terminal, further lines begin below the text.
    `plain_label` is the label without its markup, where it has any."""
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
    width, height = (None, None) if sys.stderr.isatty() else (WIDEST, _LINES)
    return Console(stderr=True, width=width, height=height, highlight=False, soft_wrap=True)


HIDDEN = ("Cc", "Cf", "Cs", "Co")
"""Categories of characters that do something else than to show themselves."""


def clean(text: object) -> str:
    """`text` without control and bidirectional characters, with rich markup escaped."""
    return escape(printable(text))


def printable(text: object) -> str:
    """`text` without control and bidirectional characters, for what is written without rich."""
    shown = streams.with_bytes(str(text))
    return "".join(c for c in shown if unicodedata.category(c) not in HIDDEN)


def emit_json(value: dict[str, Any]) -> None:
    """Print exactly one JSON object on stdout. Control and bidirectional characters, and those that
    it cannot encode, are `\\u` escapes."""
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
    if not quiet and NOTES[-1]:
        sys.stdout.flush()  # where both go to one file, they keep their order
        err().print(clean(text))


def print_failure(error: OscarZooError | None) -> None:
    """The line of an error, if there is one, beside results that stay."""
    if error is not None:
        print_error(error.code, error.message, error.hint, as_json=False)


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def gigabytes(size: int) -> str:
    """`size` bytes for people, in GB; what is less than one in MB or kB."""
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else megabytes(size)


def gibibytes(size: int) -> str:
    """The memory of a GPU for people, in the unit in which it is sold."""
    return f"{round(size / (1 << 30), 1):g} GiB"


def megabytes(size: int) -> str:
    """`size` bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
