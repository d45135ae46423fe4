"""Help texts that fit the terminal: lines break at spaces only, and examples go on after a
backslash."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable

import click

WIDEST = 100
_NARROW = 80
_WORD = r"""(?:[^\s"']|"[^"]*"|'[^']*')+"""
_PART = re.compile(rf"--[a-z-]+ (?!-){_WORD}|{_WORD}")
"""A word of a command, or an option with its value."""


class HelpFormatter(click.HelpFormatter):
    """Click's formatter, which would break words at hyphens and where a column is narrow."""

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        terminal = shutil.get_terminal_size().columns
        super().__init__(indent_increment, width or max(min(terminal, max_width or WIDEST), 20))

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        lines = _wrap(f"{prefix or 'Usage: '}{prog} {args}", self.width, "", "    ")
        self.write("\n".join(lines) + "\n")

    def write_text(self, text: str) -> None:
        """Paragraphs; one that begins with a backspace keeps its lines, which are commands or
        tables."""
        indent, width = " " * self.current_indent, self.width
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
            first, *rest = paragraph.splitlines() or [""]
            if first.strip() == "\b":
                shown = [part for line in rest for part in _continued(indent + line, width)]
            else:
                shown = _wrap(" ".join([first, *rest]), width, indent, indent)
            paragraphs.append("\n".join(shown))
        self.write("\n\n".join(paragraphs) + "\n")

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Names and what they mean, side by side, or below each other where a name is long."""
        rows = list(rows)
        most = col_max if self.width >= _NARROW else 14
        column = min(most, max((len(first) for first, _ in rows), default=0)) + col_spacing
        margin = " " * self.current_indent
        for first, second in rows:
            start = margin + first
            if not second:
                self.write(start + "\n")
                continue
            if len(first) > column - col_spacing:
                self.write(start + "\n")
                start = margin
            filled = start.ljust(self.current_indent + column)
            self.write("\n".join(_wrap(second, self.width, filled, " " * len(filled))) + "\n")


class Context(click.Context):
    """A context whose help is written by `HelpFormatter`."""

    formatter_class = HelpFormatter


def format_help(command: click.Command) -> None:
    """Let `command`, and the commands of a group, write their help with `HelpFormatter`."""
    command.context_class = Context
    for inner in getattr(command, "commands", {}).values():
        format_help(inner)


def _wrap(text: str, width: int, first: str, rest: str) -> list[str]:
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first.rstrip()]


def _continued(line: str, width: int) -> list[str]:
    """A command as lines that a shell reads as one; quoted words stay whole."""
    if len(line) <= width or not line.strip():
        return [line.rstrip()]
    margin = line[: len(line) - len(line.lstrip())]
    lines, current = [], ""
    for word in _PART.findall(line):
        if current and len(current) + 1 + len(word) + 2 > width:
            lines.append(f"{current} \\")
            current = f"{margin}  {word}"
        else:
            current = f"{current} {word}" if current else margin + word
    return [*lines, current]
