"""The phases of a long piece of work, known before it starts. Needs no torch.

The working function calls `Progress` with `(done, total, name)`, counted in the unit of the phase
of that name. A total of 0 says only that the phase has begun. The total of a phase never changes. A
phase may end early, and may be left out.
"""

from __future__ import annotations

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
