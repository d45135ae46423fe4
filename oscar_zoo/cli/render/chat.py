"""A conversation on a terminal, or one question: answers go to stdout while they arrive."""

from __future__ import annotations

import contextlib
import re
import select
import signal
import sys
from collections.abc import Iterator

from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import OscarZooError, UsageError
from oscar_zoo.serving.chat import ChatSession

NEW = "/new"
ENDS = ("/bye", "/exit", "/quit")
"""The line that starts another conversation."""
_COMMAND = re.compile(r"/[A-Za-z]+")
"""A line that is meant as a command; a path or a sentence is a question."""
PROMPT = "> "
PASTE_SECONDS = 0.05
"""Seconds in which the next line of a pasted text is there."""
SIGNAL_SECONDS = 0.25
"""Seconds after which a signal is noticed that came just before a read."""


def talk(chat: ChatSession) -> None:
    """Ask what is typed on the terminal, and write the answers to stdout, until the input ends.

    Ctrl-C ends one answer, or drops the line that is being typed, and an error is printed. A second
    Ctrl-C at the prompt ends the chat.
    """
    with contextlib.suppress(ImportError):  # then lines cannot be edited
        import readline  # noqa: F401  (`input` edits lines with it, and keeps them for "up")
    warned = ended = False
    while not ended:
        asked = False
        try:
            text, ended = _typed()
            if text in ENDS:
                return
            asked, warned = True, False
            _turn(chat, text)
        except KeyboardInterrupt:
            if warned and not asked:
                raise
            _end_line()
            if not asked:
                warned = True
                terminal.note("Ctrl-D ends the chat, and so does Ctrl-C once more.")


def answer(chat: ChatSession, question: str) -> None:
    """Ask `question` and write the answer to stdout. Raises `OscarZooError`."""
    _show(chat.ask(question))
    if chat.answer.cut:
        terminal.note("note: the answer was cut off; for longer ones: --max-tokens N")


def _turn(chat: ChatSession, text: str) -> None:
    """Answer what was typed, or do it where it is a command."""
    try:
        if text == NEW:
            chat.forget()
        elif _COMMAND.fullmatch(text):
            raise UsageError(
                f"{text} is no command of the chat.",
                hint=f"{NEW} starts another conversation, and Ctrl-D ends the chat",
            )
        elif text:
            answer(chat, text)
    except OscarZooError as error:
        terminal.print_failure(error)


def _typed() -> tuple[str, bool]:
    """The next question, and whether the input ends behind it. Lines that wait already, as those
    of a pasted text do, belong to it."""
    lines: list[str] = []
    try:
        while not lines or select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            lines.append(_line("" if lines else PROMPT))
    except EOFError:
        _end_line()
        return "\n".join(lines).strip(), True
    except SystemExit:  # SIGTERM; click begins a line after Ctrl-C
        _end_line()
        raise
    return "\n".join(lines).strip(), False


def _line(prompt: str) -> str:
    """`input`, which a signal interrupts that came just before it: nothing else would notice it
    before the next line, so a timer interrupts the read again and again."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, SIGNAL_SECONDS, SIGNAL_SECONDS)
    try:
        return input(prompt)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _show(parts: Iterator[str]) -> None:
    """Write an answer while it arrives, without control characters. An error that breaks it off
    begins a line."""
    begun = False
    try:
        for part in parts:
            begun = True
            lines = part.replace("\t", "    ").split("\n")
            sys.stdout.write("\n".join(map(terminal.printable, lines)))
            sys.stdout.flush()
    except (OscarZooError, SystemExit):
        if begun:
            _end_line()
        raise
    _end_line()


def _end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
