"""oscar-zoo: registry, hub tooling and SGLang plugin for 2-bit KV caches.

Importing this package loads no heavy library; the calls of `oscar_zoo.api` are loaded when first
used.
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

__all__ = [
    "Artifact",
    "__version__",
    "deprecate",
    "installed",
    "mirror",
    "publish",
    "pull",
    "unyank",
    "verify",
    "yank",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("oscar_zoo.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
