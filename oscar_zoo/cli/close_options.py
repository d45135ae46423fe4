"""Options that may have been meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

CLOSE = 0.75
"""How similar an option must be to be suggested, as `difflib` measures it."""


def closest_first(typed: str, options: Sequence[str]) -> tuple[str, ...]:
    """The option that is most similar to `typed`, then those that begin or end with its words."""
    similar = difflib.get_close_matches(typed, options, n=1, cutoff=CLOSE)
    parts = sorted(option for option in options if _is_part(typed, option))
    return tuple(dict.fromkeys((*similar, *parts)))


def _is_part(typed: str, option: str) -> bool:
    words, whole = (text.lstrip("-").split("-") for text in (typed, option))
    return words in (whole[: len(words)], whole[-len(words) :])
