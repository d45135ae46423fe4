"""A conversation on a terminal or through a pipe: lines of stdin in, answers to stdout."""

from __future__ import annotations

import re
import select
import signal
import socket
import sys
from collections.abc import Iterator

from oscar_zoo.app.chat import ChatSession
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import ServerFailed, UsageError

NEW = "/new"
"""The line that starts another conversation."""
_COMMAND = re.compile(r"/[A-Za-z]+")
"""A line that is meant as a command; a path or a sentence is a question."""
PROMPT = "> "


def talk(chat: ChatSession) -> None:
    """Send lines of stdin to the server and write its answers to stdout, until the input ends.

    On a terminal, Ctrl-C ends one answer, or drops the line that is being typed, and an error is
    printed. A second Ctrl-C at the prompt ends the chat. Elsewhere both end it at once.

    Raises:
        ServerFailed: as `ChatSession.ask`.
        UsageError: a line is a command that there is not.
        KeyboardInterrupt: Ctrl-C ended the chat.
    """
    people, warned = sys.stdin.isatty(), False
    while True:
        asked = False
        try:
            line = _line(people)
            if line is None:
                return
            asked, warned = True, False
            _turn(chat, line.strip(), people)
        except KeyboardInterrupt:
            if not people or (warned and not asked):
                raise
            _end_line()
            if not asked:
                warned = True
                terminal.note("Ctrl-D ends the chat, and so does Ctrl-C once more.")


def _turn(chat: ChatSession, text: str, people: bool) -> None:
    """Answer one line."""
    if text == NEW:
        chat.forget()
    elif text:
        try:
            _check_command(text)
            _show(chat.ask(text))
            if chat.cut:
                terminal.note("note: the answer was cut off; for longer ones: --max-tokens N")
        except (ServerFailed, UsageError) as error:
            if not people:
                raise
            terminal.print_error(error.code, error.message, error.hint, as_json=False)


def _check_command(text: str) -> None:
    """Raise `UsageError` for what looks like a command: no command but `NEW` is there."""
    if _COMMAND.fullmatch(text):
        raise UsageError(
            f"{text} is no command of the chat.",
            hint=f"{NEW} starts another conversation, and Ctrl-D ends the chat",
        )


def _line(people: bool) -> str | None:
    """The next line of stdin, or `None` at its end."""
    if not people:
        return sys.stdin.readline() or None
    try:
        sys.stdout.write(PROMPT)
        sys.stdout.flush()
        _await_line()
        line = sys.stdin.readline()
    except SystemExit:  # SIGTERM; click begins a line after Ctrl-C
        _end_line()
        raise
    if not line:
        _end_line()
    return line or None


def _await_line() -> None:
    """Wait until the terminal has a line. A signal that comes between the prompt and a read of it
    would be noticed only after the next line, so this waits for signals too."""
    noticed, signalled = socket.socketpair()
    with noticed, signalled:
        signalled.setblocking(False)
        before = signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
        try:
            select.select([sys.stdin, noticed], [], [])
        finally:
            signal.set_wakeup_fd(before)


def _show(parts: Iterator[str]) -> None:
    """Write an answer while it arrives, without control characters. An error that breaks it off
    begins a line."""
    begun = False
    try:
        for part in parts:
            begun = True
            sys.stdout.write(
                "\n".join(
                    terminal.printable(line) for line in part.replace("\t", "    ").split("\n")
                )
            )
            sys.stdout.flush()
    except (ServerFailed, SystemExit):
        if begun:
            _end_line()
        raise
    _end_line()


def _end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
