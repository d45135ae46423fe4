"""The phases of a long piece of work, known before it starts. Needs no torch.

Whoever works tells `(done, total, name)`: where it is in the phase of that name, in the phase's own
unit. A total of 0 says only that the phase has begun. The total of a phase never changes; a phase
may end early, and may be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int, str], None]
"""Told `(done, total, name of the phase)`."""


@dataclass(frozen=True)
class Phase:
    """One of them.

    Attributes:
        name: for people.
        unit: of what is counted in it, such as `tokens`; empty where nothing is.
        seconds: how long it is expected to take; only its share counts where nobody can tell.
    """

    name: str
    unit: str = ""
    seconds: float = 1.0
