"""How a use case reports while it works: phases, counts, remarks, and the one question it may ask.

A use case takes an `Observer` and never prints. The command line draws bars and lines from what it
is told; a Python caller passes an observer of its own, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from oscar_zoo.evaluate.shared import Phase, Progress


@dataclass(frozen=True)
class Note:
    """A remark that changes nothing about the result. `code` is its stable name, `facts` are the
    values that the sentence mentions, and a `step` says what the use case does now."""

    code: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: Literal["note", "step", "warning"] = "note"


class Observer(Protocol):
    """Takes the news of one use case; any method may be called from several threads."""

    def begin(self, phases: Sequence[Phase], *, timed: bool) -> None:
        """Say which phases will come, none at the end; `timed`: their seconds are an estimate."""

    def advance(self, label: str, done: int, total: int, unit: str = "") -> None:
        """Say how far the work called `label` is; a `total` of 0 says only that it has begun."""

    def note(self, note: Note) -> None:
        """Pass on a remark."""

    def confirm(self, question: Note) -> bool:
        """Ask whether to go on; `False` where nobody can be asked."""


class Silent:
    """An observer that ignores all news and answers every question with no."""

    def begin(self, phases: Sequence[Phase], *, timed: bool) -> None: ...

    def advance(self, label: str, done: int, total: int, unit: str = "") -> None: ...

    def note(self, note: Note) -> None: ...

    def confirm(self, question: Note) -> bool:
        return False


SILENT: Observer = Silent()
"""For callers who want no news."""


def phase_progress(observer: Observer) -> Progress:
    """A callback for work that reports `(done, total, phase)`, which tells `observer`."""
    return lambda done, total, phase: observer.advance(phase, done, total)
