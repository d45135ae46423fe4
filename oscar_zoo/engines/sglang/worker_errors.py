"""A server that refuses to start says why in one line, as `oscar-zoo` does, instead of in a
traceback of SGLang.

Only errors of this library are shown so, and only where they would end the process anyway.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from oscar_zoo.errors import OscarZooError

DEBUG = "OSCAR_ZOO_DEBUG"
"""Variable that shows tracebacks again."""


def install() -> None:
    """From here on, an error of ours that nobody catches becomes one line on stderr; every other
    stays as it was.

    Tracebacks, which SGLang logs for its workers, end with the hint.
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
    """The message, and the hint where there is one."""
    hint = f" {error.hint[0].upper()}{error.hint[1:]}" if error.hint else ""
    return f"error: {error.message}{hint}"
