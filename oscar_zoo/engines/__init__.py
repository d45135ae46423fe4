"""Serving engines that an INT2 cache runs in, one folder each; nothing in `runtime` knows them."""

from __future__ import annotations

import itertools
import os
import sys
from types import TracebackType

from oscar_zoo.errors import OscarZooError


def show_errors_in_one_line() -> None:
    """Show uncaught errors of ours as `oscar-zoo` shows them, in one line on stderr in place of a
    traceback; other errors stay as they were."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, OscarZooError) and os.environ.get("OSCAR_ZOO_DEBUG") != "1":
            sys.stderr.write(one_line(error) + "\n")
        else:
            before(kind, error, trace)

    sys.excepthook = show


def is_asked_for(dtype: str) -> bool:
    """Whether the command line of this process asks for a type of KV cache."""
    flag = "--kv-cache-dtype"
    return f"{flag}={dtype}" in sys.argv or (flag, dtype) in itertools.pairwise(sys.argv)


def one_line(error: OscarZooError) -> str:
    hint = f" {error.hint[0].upper()}{error.hint[1:]}" if error.hint else ""
    return f"error: {error.message}{hint}"
