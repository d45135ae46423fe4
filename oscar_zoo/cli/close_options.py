"""Options that may have been meant by one that does not exist."""

from __future__ import annotations

from collections.abc import Iterable

_LETTERS_PER_SLIP = 3
"""One slip may be in so many letters."""


def closest_first(typed: str, options: Iterable[str]) -> tuple[str, ...]:
    """Those of `options` that are close to `typed`, the closest one first.

    An option is close if few letters were mistyped, or if its first or last words are what was
    typed.
    """
    found = [(_slips(typed, option), option) for option in options]
    return tuple(
        option
        for slips, option in sorted(found)
        if slips <= _allowed(typed) or _is_part(typed, option)
    )


def _allowed(typed: str) -> int:
    return max(1, len(typed.lstrip("-")) // _LETTERS_PER_SLIP)


def _is_part(typed: str, option: str) -> bool:
    words, whole = (text.lstrip("-").split("-") for text in (typed, option))
    return words in (whole[: len(words)], whole[-len(words) :])


def _slips(one: str, two: str) -> int:
    """Letters that were added, left out, changed, or swapped with the next one."""
    before, above = [0], list(range(len(two) + 1))
    for row, letter in enumerate(one, 1):
        current = [row]
        for column, other in enumerate(two, 1):
            changed = above[column - 1] + (letter != other)
            current.append(min(changed, above[column] + 1, current[-1] + 1))
            swapped = row > 1 and column > 1 and (one[row - 2], letter) == (other, two[column - 2])
            if swapped:
                current[-1] = min(current[-1], before[column - 2] + 1)
        before, above = above, current
    return above[-1]
