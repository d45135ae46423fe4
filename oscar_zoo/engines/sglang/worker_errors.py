"""Errors of a server that refuses to start, shown in one line as `oscar-zoo` shows them, instead of
in a traceback of SGLang.

This covers only errors of this library, and only where they end the process anyway.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from oscar_zoo.errors import OscarZooError

DEBUG = "OSCAR_ZOO_DEBUG"
"""Environment variable; the value 1 shows tracebacks."""


def install() -> None:
    """Show uncaught errors of ours as one line on stderr from now on; other errors stay as they
    were.

    The tracebacks that SGLang logs for its workers end with the hint.
    """
    setattr(OscarZooError, "__notes__", property(_notes))  # noqa: B010 (a class has no such attribute to assign)
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, OscarZooError) and os.environ.get(DEBUG) != "1":
            sys.stderr.write(one_line(error) + "\n")
        else:
            before(kind, error, trace)

    sys.excepthook = show


def _notes(error: OscarZooError) -> list[str]:
    return [f"hint: {error.hint}"] if error.hint else []


def one_line(error: OscarZooError) -> str:
    """The message, followed by the hint if there is one."""
    hint = f" {error.hint[0].upper()}{error.hint[1:]}" if error.hint else ""
    return f"error: {error.message}{hint}"
