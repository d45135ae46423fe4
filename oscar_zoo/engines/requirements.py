"""Whether the libraries that a use case needs are installed.

Nothing here imports torch at the top, so that a missing library is reported as such.
"""

from __future__ import annotations

import importlib.util

from oscar_zoo.errors import MissingDependency


def require_compute() -> None:
    """Check that torch and transformers are installed, without importing them."""
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependency.for_extra(library, "compute")


def require_serve() -> None:
    """Check that torch and a supported sglang are installed, without importing them."""
    from oscar_zoo.engines.sglang.compat.releases import sglang_version

    for library in ("torch", "sglang"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependency.for_extra(library, "serve")
    sglang_version()


def require_eval() -> None:
    """Check that the harness of benchmarks is installed, without importing it; raises
    `MissingDependency`."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingDependency.for_extra("lm-eval", "eval")
