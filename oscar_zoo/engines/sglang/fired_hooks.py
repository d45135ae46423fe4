"""Which hooks ran, and the numbers that they gave to SGLang.

SGLang swallows exceptions that are raised while a hook is installed. So each hook notes in `FIRED`
that it ran, and the attention backend refuses to start if one is missing.
"""

from __future__ import annotations

from typing import Any

FIRED: set[str] = set()
"""Hooks that ran in this process with int2."""

BEFORE_BACKEND = frozenset({"rendezvous", "kv_dtype", "slot_bytes", "budget", "rows", "pool"})
"""Hooks that must have run when the attention backend is built."""

FACTS: dict[str, Any] = {}
"""Numbers for reports that the hooks gave to SGLang."""
