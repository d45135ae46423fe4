"""oscar-zoo: registry, hub tooling and SGLang plugin for 2-bit KV caches.

Importing this package loads no heavy library; the calls of `oscar_zoo.api` and
`oscar_zoo.api_compute` are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from oscar_zoo.version import __version__

if TYPE_CHECKING:
    from oscar_zoo.api import (
        Artifact,
        deprecate,
        installed,
        mirror,
        publish,
        pull,
        unyank,
        verify,
        yank,
    )
    from oscar_zoo.api_compute import (
        compute_artifact,
        draw_report,
        evaluate_artifact,
        fit,
        merge_moments,
    )
    from oscar_zoo.app.running_server import RunningServer
    from oscar_zoo.app.serve import serve

_SERVE = {"RunningServer": "oscar_zoo.app.running_server", "serve": "oscar_zoo.app.serve"}
_NEED_TORCH = ("compute_artifact", "draw_report", "evaluate_artifact", "fit", "merge_moments")
__all__ = [
    "Artifact",
    "RunningServer",
    "__version__",
    "compute_artifact",
    "deprecate",
    "draw_report",
    "evaluate_artifact",
    "fit",
    "installed",
    "merge_moments",
    "mirror",
    "publish",
    "pull",
    "serve",
    "unyank",
    "verify",
    "yank",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    usual = "oscar_zoo.api_compute" if name in _NEED_TORCH else "oscar_zoo.api"
    module = _SERVE.get(name, usual)
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
