"""Entry point of group `sglang.srt.plugins`; SGLang calls it once in every process that may need a
hook.

Importable without sglang. SGLang logs and swallows an exception raised here, and then refuses the
unknown dtype, so int2 cannot start without its hooks.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Sequence
from types import TracebackType

from oscar_zoo.errors import OscarZooError, UnsupportedMachine

logger = logging.getLogger(__name__)


def register() -> None:
    """Install the hooks of the INT2 cache; every one of them returns at once unless the KV dtype is
    int2. On a version of SGLang that is not supported nothing is installed, with one warning."""
    from oscar_zoo.engines.sglang.hooks import installation

    show_errors_in_one_line()
    try:
        installation.install()
    except UnsupportedMachine as error:
        if _asks_for_int2(sys.argv):
            raise SystemExit(one_line(error)) from None
        logger.warning("No INT2 KV cache: %s", error.message)


def _asks_for_int2(argv: Sequence[str]) -> bool:
    flag = "--kv-cache-dtype"
    return f"{flag}=int2" in argv or (flag, "int2") in itertools.pairwise(argv)


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


def one_line(error: OscarZooError) -> str:
    hint = f" {error.hint[0].upper()}{error.hint[1:]}" if error.hint else ""
    return f"error: {error.message}{hint}"
