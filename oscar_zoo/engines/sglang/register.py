"""Entry point of group `sglang.srt.plugins`; SGLang calls it once in every process that may need a
hook.

Importable without sglang. SGLang logs and swallows an exception raised here, and then refuses the
unknown dtype, so int2 cannot start without its hooks.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Sequence

from oscar_zoo.engines import one_line, show_errors_in_one_line
from oscar_zoo.errors import UnsupportedMachine

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
