"""Whether the libraries that a use case needs are installed, told without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from oscar_zoo.errors import MissingDependency, UnsupportedMachine
from oscar_zoo.next_step import Install

SERIES = "0.33"
"""Of vLLM. Other releases have other runners and other cache managers."""


def require_compute() -> None:
    _require("compute", "torch", "transformers")


def require_serve() -> None:
    from oscar_zoo.engines.sglang.compat.releases import sglang_version

    _require("serve", "torch", "sglang")
    sglang_version()


def require_vllm() -> None:
    _require("serve-vllm", "torch")
    vllm_version()  # where SGLang runs on a CPU, a stand-in has the name


def vllm_version() -> str:
    """The installed release, which must be supported."""
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependency(
            "this needs vllm, which is not installed.",
            hint="SGLang wants another torch, so take an environment without it",
            next_step=Install("serve-vllm"),
        ) from None
    if not found.startswith(f"{SERIES}."):
        hint = f"pip install 'vllm=={SERIES}.*'"
        raise UnsupportedMachine(f"vLLM {found} is not supported.", hint=hint)
    return found


def require_eval() -> None:
    _require("eval", "lm_eval")


def _require(extra: str, *libraries: str) -> None:
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise MissingDependency.for_extra(library.replace("_", "-"), extra)
