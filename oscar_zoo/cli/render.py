"""What people and programs see. Data goes to stdout, everything else to stderr; the same facts either way.

Text that came from a file, a manifest or a hub passes `clean` before it reaches a terminal.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

NOT_REPORTED = "not reported"
_WIDEST = 4096
MARKS = {
    "ok": "[green]ok[/]",
    "warning": "[yellow]warning[/]",
    "failed": "[red]FAILED[/]",
    "not checked": "not checked",
}

ProgressCallback = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""


def out() -> Console:
    """Console of stdout, for data: never breaks a line or shortens a cell, so that what it shows can be copied."""
    return Console(width=_WIDEST, soft_wrap=True, highlight=False)


def is_narrow(columns: int) -> bool:
    """Whether stdout is a terminal with fewer than `columns` columns."""
    return sys.stdout.isatty() and shutil.get_terminal_size().columns < columns


def err() -> Console:
    """Console of stderr, for everything that is not data."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def clean(text: object) -> str:
    """`text` without control and bidirectional characters, with rich markup escaped."""
    kept = "".join(c for c in str(text) if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co"))
    return escape(kept)


def emit_json(value: dict[str, Any]) -> None:
    """Print exactly one JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_error(code: str, message: str, hint: str | None, *, as_json: bool) -> None:
    """One line: cause and next step. With `--json` one object on stdout."""
    if as_json:
        emit_json({"error": {"code": code, "message": message, "hint": hint}})
        return
    line = f"[bold red]error:[/] {clean(message)}"
    if hint:
        line += ("" if message.endswith((".", "!", "?", ":")) else ".") + f" {clean(_sentence(hint))}"
    err().print(line)


def _sentence(hint: str) -> str:
    """`hint` with a capital letter, unless it starts with a command the user can copy."""
    return hint if hint.startswith(("oscar-zoo ", "pip ", "chmod ", "make ")) else hint[0].upper() + hint[1:]


def note(text: str, *, quiet: bool = False) -> None:
    """A line for people on stderr."""
    if not quiet:
        err().print(clean(text))


def table(*columns: str, right: tuple[int, ...] = ()) -> Table:
    """A plain table; `right` are the indexes of numeric columns."""
    result = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for index, name in enumerate(columns):
        result.add_column(name, justify="right" if index in right else "left", no_wrap=True)
    return result


def megabytes(size: int) -> str:
    """`size` bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


@contextlib.contextmanager
def progress(unit: str, *, enabled: bool) -> Iterator[ProgressCallback]:
    """Bars with time left on stderr, only on a terminal; the callback takes (done, total, what).

    Args:
        unit: of the numbers: `bytes`, or a word to show behind them. A total of 0 is work of unknown length.
        enabled: whether to show anything.
    """
    if not enabled or not sys.stderr.isatty():
        yield lambda done, total, text: None
        return
    columns = (
        TextColumn("  {task.description:<26}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]:>22}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=err(), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(done: int, total: int, text: str) -> None:
            if text not in tasks:
                for phase in [task.id for task in bars.tasks if task.total is None]:
                    bars.remove_task(phase)
                tasks[text] = bars.add_task(text, total=total or None, count="", left="")
            if total and tasks[text] in bars.task_ids:
                left = "left" if done < total else ""
                bars.update(tasks[text], completed=done, total=total, count=_count(done, total, unit), left=left)

        yield update


def _count(done: int, total: int, unit: str) -> str:
    return f"{megabytes(done)} of {megabytes(total)}" if unit == "bytes" else f"{done:,} of {total:,} {unit}".rstrip()


@contextlib.contextmanager
def waiting(text: str, *, enabled: bool) -> Iterator[Callable[[float], None]]:
    """A line with the seconds waited, on stderr and only on a terminal; the callback takes the seconds so far."""
    if not enabled or not sys.stderr.isatty():
        yield lambda seconds: None
        return
    with err().status(text) as status:
        yield lambda seconds: status.update(f"{text}  {seconds:.0f} s")
