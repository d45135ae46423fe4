"""SGLang's server arguments: their parser, when they may change, and what was decided in the
end."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oscar_zoo.engines.sglang.compat import releases


def add_dtype_choice(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Let `--kv-cache-dtype` accept `dtype`."""
    for action in parser._actions:
        if (
            action.dest == "kv_cache_dtype"
            and action.choices is not None
            and dtype not in action.choices
        ):
            action.choices = [*action.choices, dtype]


def may_set_defaults(server_args: Any) -> bool:
    """Whether assignments are still accepted; `resolve_once` runs again in every child, on a
    finished record."""
    return not getattr(server_args, "_resolution_finished", False)


def resolved(server_args: Any) -> Any:
    """The configuration that SGLang decided on: a view of its declarations over the raw record."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


@contextmanager
def shown_backend(server_args: Any, name: str) -> Iterator[None]:
    """Another attention backend in arguments that SGLang is still deciding, for a while."""
    before = server_args.attention_backend
    unsealed = super(type(server_args), server_args)  # its own setter refuses while it decides
    unsealed.__setattr__("attention_backend", name)
    try:
        yield
    finally:
        unsealed.__setattr__("attention_backend", before)


def architectures(server_args: Any) -> tuple[str, ...]:
    """What the `config.json` of the model calls its classes."""
    return tuple(model_config(server_args).hf_config.architectures or ())


def model_config(server_args: Any) -> Any:
    """SGLang's `ModelConfig` of the served model, which it keeps."""
    if releases.RESOLVE.here(type(server_args)):
        from sglang.srt.arg_groups.model_override_base import model_config_of

        return model_config_of(server_args)
    return server_args.get_model_config()


def published_dtype() -> str | None:
    """`--kv-cache-dtype` of the server this process belongs to; `None` before SGLang published its
    arguments."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return str(get_server_args().kv_cache_dtype)
    except ValueError:
        return None
