"""Entry point of group `vllm.general_plugins`; vLLM calls it in every process, some more than once.

Importable without vllm. vLLM ends when this raises, whatever it was asked for. So a release that is
not supported gets one warning, and only who asks for our type of cache gets an error.
"""

from __future__ import annotations

import logging

from oscar_zoo.engines import is_asked_for, one_line, show_errors_in_one_line
from oscar_zoo.engines.requirements import vllm_version
from oscar_zoo.errors import OscarZooError

logger = logging.getLogger(__name__)
DTYPE = "oscar_int2"
"""Of `--kv-cache-dtype`."""
NAME = "OSCAR_INT2"
"""Of `--attention-backend`."""
BACKEND = "oscar_zoo.engines.vllm.backend.Int2Backend"
PLACEMENT = "oscar_zoo.engines.vllm.placement.Int2Placement"


def register() -> None:
    show_errors_in_one_line()
    try:
        _install()
    except Exception as error:  # whatever a release lacks: it would end every vLLM
        if is_asked_for(DTYPE):
            ours = error if isinstance(error, OscarZooError) else None
            lacks = f"error: this vLLM lacks what an INT2 KV cache needs: {error}"
            raise SystemExit(one_line(ours) if ours else lacks) from None
        logger.warning("No INT2 KV cache: %s", error)


def _install() -> None:
    from oscar_zoo.engines.vllm import compat, hooks

    vllm_version()
    compat.register_dtype(DTYPE)
    compat.register_backend(NAME, BACKEND)
    hooks.install()
