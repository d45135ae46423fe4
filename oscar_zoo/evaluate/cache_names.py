"""Names of the caches of a comparison, for people."""

from __future__ import annotations

NAMES = {
    "bf16": "BF16",
    "int2": "INT2, no transform",
    "int2-hadamard": "INT2, Hadamard",
    "int2-hadamard-clip": "INT2, Hadamard, clipped",
    "artifact": "INT2, this artifact",
}


def cache_title(cache: str) -> str:
    """A cache of `NAMES`, or whatever else has that name, such as a server."""
    return NAMES.get(cache, cache)
