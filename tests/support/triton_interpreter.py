"""Triton's interpreter without the third of its time that goes into patching what is patched
already.

While a kernel runs, the interpreter puts functions of its own in place of those of
`triton.language`. It looks for them again at every call of a device function, of which a launch
makes thousands.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def patch_once() -> None:
    """From now on, in this process, a call of a device function leaves alone what its launch has
    patched."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch, is_builtin = interpreter._patch_lang, tl.core.is_builtin

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_lang(fn: Any) -> Any:
        first = [*(lang.program_id for lang in languages(fn)), tl.tensor.__add__, tl.math.exp]
        return patch(fn) if any(map(is_builtin, first)) else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang
