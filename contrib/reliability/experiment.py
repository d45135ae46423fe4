"""What an experiment of `make reliability` is, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Scale:
    """How much of an experiment to do.

    Attributes:
        work: an empty folder of its own.
        whole: everything that the promise asks for; otherwise a sample that takes seconds.
    """

    work: Path
    whole: bool

    def sample(self, numbers: range, few: int) -> list[int]:
        """All of `numbers`, or `few` of them that are spread over all."""
        if self.whole or len(numbers) <= few:
            return list(numbers)
        step = len(numbers) / few
        return [numbers[int((index + 0.5) * step)] for index in range(few)]


@dataclass(frozen=True)
class Found:
    """What an experiment did and found.

    Attributes:
        figures: what was counted, in the order of the page, such as `{"kill points": 412}`.
        violations: one line for each time the promise did not hold.
    """

    figures: Mapping[str, int | float | str]
    violations: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Experiment:
    """One promise put to the test.

    Attributes:
        number: of the promise, such as `S7`.
        name: in lower case, for `--only`.
        promise: one sentence.
        run: does it.
        lacking: says why it cannot run on this machine, or `None`.
        instead: the tests of parts of it that `make test` runs, where a sample takes too long.
    """

    number: str
    name: str
    promise: str
    run: Callable[[Scale], Found]
    lacking: Callable[[], str | None] = lambda: None
    instead: str | None = None
