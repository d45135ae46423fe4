"""SGLang's server arguments: their parser, when they may change, what was decided in the end, and
an engine that is made of them in one of our own programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from oscar_zoo.engines.sglang.compat import releases

ABOUT_IMAGES = (
    "is_multimodal is_audio_model is_image_understandable_model is_audio_understandable_model"
    " is_multimodal_chunked_prefill_supported is_multimodal_piecewise_cuda_graph_supported"
    " is_multimodal_breakable_cuda_graph_supported".split()
)
"""What SGLang's configuration of a model says about images and sound."""


def add_dtype_choice(parser: argparse.ArgumentParser, dtype: str) -> None:
    for action in parser._actions:
        if action.dest == "kv_cache_dtype" and dtype not in (action.choices or (dtype,)):
            action.choices = [*(action.choices or ()), dtype]


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


def published() -> Any:
    """The resolved arguments of the server this process belongs to."""
    from sglang.srt.runtime_context import get_server_args

    return resolved(get_server_args())


def host_cache_bytes() -> int:
    """Bytes that a worker keeps for pages in the host's memory, where the user says it."""
    args = published()
    return int(args.hicache_size * 1e9) if args.enable_hierarchical_cache else 0


def leave_out_images(model_config: Any) -> None:
    """Say of a model that has images unless told otherwise what SGLang says of one without."""
    for name in ABOUT_IMAGES:
        if hasattr(model_config, name):
            setattr(model_config, name, False)


def read() -> None:
    """Read the arguments of this process as a server does; ends it with 2 where they are wrong."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    parser.parse_args()


def open_engine(arguments: Sequence[str]) -> Any:
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # before the command line is read, because plugins add flags to it
    return sglang.Engine(server_args=prepare_server_args(list(arguments)))
