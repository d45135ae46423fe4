"""Better tiles by trying neighbours: one field at a time, the fastest stays, until no field
helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

GAIN = 0.99
"""A candidate must take less than this part of the time of the best so far; less is noise."""

Clock = Callable[[Any], float]


def descend(
    start: Any,
    values: Mapping[str, Sequence[object]],
    clock: Clock,
    *,
    note: Callable[[str], None],
    rounds: int = 2,
) -> tuple[Any, float, float]:
    """The fastest of the tiles that single changes lead to.

    Args:
        clock: seconds with some tiles; infinity for tiles that cannot run.
        rounds: over all fields, at most.

    Returns:
        The best tiles, their seconds, and the seconds of `start`.
    """
    first = best_seconds = clock(start)
    best, seen = start, {start}
    note(f"{first * 1e6:9.1f} us  {start}  (in use)")
    for _ in range(rounds):
        before = best
        for name, choices in values.items():
            for tiles in [replace(best, **{name: choice}) for choice in choices]:
                if tiles in seen:
                    continue
                seen.add(tiles)
                seconds = clock(tiles)
                note(f"{seconds * 1e6:9.1f} us  {tiles}")
                if seconds < GAIN * best_seconds:
                    best, best_seconds = tiles, seconds
        if best == before:
            break
    return best, best_seconds, first
