"""Whether the libraries that a use case needs are installed, told without importing them."""

from __future__ import annotations

import importlib.util

from oscar_zoo.errors import MissingDependency


def require_compute() -> None:
    _require("compute", "torch", "transformers")


def require_serve() -> None:
    """torch, and a supported release of SGLang."""
    from oscar_zoo.engines.sglang.compat.releases import sglang_version

    _require("serve", "torch", "sglang")
    sglang_version()


def require_vllm() -> None:
    """torch, and a supported release of vLLM."""
    from oscar_zoo.engines.vllm.compat import vllm_version

    _require("serve-vllm", "torch")
    vllm_version()  # where SGLang runs on a CPU, a stand-in has the name


def require_eval() -> None:
    """The harness of benchmarks."""
    _require("eval", "lm_eval")


def _require(extra: str, *libraries: str) -> None:
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise MissingDependency.for_extra(library.replace("_", "-"), extra)
