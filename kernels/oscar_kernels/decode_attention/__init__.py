"""Split-KV attention over an INT2 cache; see kernels/README.md. Calling this package calls
`dispatch.decode_attention`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Op(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from oscar_kernels.decode_attention.dispatch import decode_attention

        return decode_attention(*args, **options)


sys.modules[__name__].__class__ = _Op
