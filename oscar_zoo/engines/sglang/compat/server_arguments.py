"""SGLang's server arguments: their parser, when they may change, and what was decided in the
end."""

from __future__ import annotations

import argparse
from typing import Any


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


def published_dtype() -> str | None:
    """`--kv-cache-dtype` of the server this process belongs to; `None` before SGLang published its
    arguments."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return str(get_server_args().kv_cache_dtype)
    except ValueError:
        return None
