"""Long work as tests of progress see it: its phases, and a clock that they turn."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.evaluate.shared import Phase

PHASES = (
    Phase("load", "", 10),
    Phase("capture", "tokens", 30),
    Phase("perplexity", "sequences", 60),
)


@dataclass
class Clock:
    """Time that passes when somebody says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now
