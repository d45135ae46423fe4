"""How SGLang puts the backend of full-attention layers and that of its other layers together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oscar_zoo.engines.sglang.compat import releases

STAND_IN = "triton"
"""A name that SGLang accepts beside linear attention on every GPU."""


def wrap(original: Callable[..., Any], runner: Any, backend: Any) -> Any:
    """Call SGLang's function that wraps a full-attention backend.

    On Blackwell GPUs it asks for one of a few names, and ours is not among them.
    """
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    if releases.BACKEND_NAMES.here(attention_backend_setup):
        names = ("prefill_attention_backend_str", "decode_attention_backend_str")
        with _shown(runner, **dict.fromkeys(names, STAND_IN)):
            return original(runner, backend)
    args = copy.copy(runner.server_args)
    object.__setattr__(args, "attention_backend", STAND_IN)  # resolved arguments are sealed
    with _shown(runner, server_args=args):
        return original(runner, backend)


@contextmanager
def _shown(owner: Any, **values: Any) -> Iterator[None]:
    """Other values of attributes, for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
