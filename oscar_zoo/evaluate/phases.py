"""The phases of a long piece of work, known before it starts. Needs no torch.

The working function calls `Progress` with `(done, total, name)`, counted in the unit of the phase
of that name. A total of 0 says only that the phase has begun. The total of a phase never changes. A
phase may end early, and may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int, str], None]
"""Called with `(done, total, name of the phase)`."""


@dataclass(frozen=True)
class Phase:
    """One phase.

    Attributes:
        name: for people.
        unit: counted unit, such as `tokens`; empty when nothing is counted.
        seconds: expected duration; when it is not known, only its share of the sum counts.
    """

    name: str
    unit: str = ""
    seconds: float = 1.0


def duration(seconds: float) -> str:
    """A duration in words, rounded up so that it does not look exact."""
    if seconds <= 50:
        return f"{10 * max(1, math.ceil(seconds / 10))} s"
    if seconds < 90 * 60:
        minutes = math.ceil(seconds / 60)
        return f"{minutes} minute{'s' if minutes > 1 else ''}"
    return f"{seconds / 3600:.0f} hours"
