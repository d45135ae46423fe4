"""An observer that keeps the news of a use case."""

from collections.abc import Sequence

from oscar_zoo.evaluate.shared import Phase
from oscar_zoo.observer import Note, Silent


class Recorder(Silent):
    def __init__(self) -> None:
        self.phases: list[tuple[str, ...]] = []
        self.progress: list[tuple[str, str]] = []
        """Labels with units."""
        self.notes: list[Note] = []

    def begin(self, phases: Sequence[Phase], *, timed: bool) -> None:
        self.phases.append(tuple(phase.name for phase in phases))

    def advance(self, label: str, done: int, total: int, unit: str = "") -> None:
        self.progress.append((label, unit))

    def note(self, note: Note) -> None:
        self.notes.append(note)

    @property
    def codes(self) -> list[str]:
        return [note.code for note in self.notes]
