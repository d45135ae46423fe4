"""Entry point of group `sglang.srt.plugins`; SGLang calls it once in every process that may need a
hook.

Importable without sglang. SGLang logs and swallows an exception raised here, and then refuses the
unknown dtype, so int2 cannot start without its hooks.
"""

from __future__ import annotations

import logging

from oscar_zoo.engines import is_asked_for, one_line, show_errors_in_one_line
from oscar_zoo.engines.setting_flags import DTYPE
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
        if is_asked_for(DTYPE):
            raise SystemExit(one_line(error)) from None
        logger.warning("No INT2 KV cache: %s", error.message)
