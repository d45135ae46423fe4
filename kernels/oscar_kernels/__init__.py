"""INT2 KV-cache quantizer and kernels: a leaf that knows nothing of oscar_zoo. Importing it loads
no torch.

The public names are fetched from their modules when they are first used; see kernels/README.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oscar_kernels.cache import (
        BatchView,
        Drafts,
        LayerCache,
        TokenTargets,
        Transforms,
        WindowState,
        allocate,
    )
    from oscar_kernels.decode_attention.dispatch import decode_attention, decode_workspace_numel
    from oscar_kernels.decode_attention.launcher import (
        Workspace,
        extend_attention,
        extend_workspace_numel,
    )
    from oscar_kernels.kv_read import materialize_prefix
    from oscar_kernels.kv_write.dispatch import write_kv_int2
    from oscar_kernels.slots import pack_slots
    from oscar_kernels.spec import QuantSpec

__all__ = [
    "BatchView",
    "Drafts",
    "LayerCache",
    "QuantSpec",
    "TokenTargets",
    "Transforms",
    "WindowState",
    "Workspace",
    "allocate",
    "decode_attention",
    "decode_workspace_numel",
    "extend_attention",
    "extend_workspace_numel",
    "materialize_prefix",
    "pack_slots",
    "write_kv_int2",
]

_HOMES = {
    "QuantSpec": "spec",
    "Workspace": "decode_attention.launcher",
    "decode_workspace_numel": "decode_attention.dispatch",
    "extend_attention": "decode_attention.launcher",
    "extend_workspace_numel": "decode_attention.launcher",
    "materialize_prefix": "kv_read",
    "pack_slots": "slots",
    "write_kv_int2": "kv_write.dispatch",
}
"""Modules of the names that are not of `cache`."""


def __getattr__(name: str) -> Any:
    if name == "decode_attention":  # the folder of that name, which can be called
        return importlib.import_module(".decode_attention", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES.get(name, 'cache')}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
