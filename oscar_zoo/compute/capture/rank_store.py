"""Sums of an engine's ranks so far, in a folder from which a killed capture can be resumed.

Every save is a folder of its own, `sums-<n>`, with a part from each rank (`ranks.py`); the state
names the last complete one (`state.py`). Sums are stored exactly as the ranks hold them, so a rank
that reads its part again continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.compute.capture.state import StateFile

SCHEMA = "oscar-zoo.capture-ranks/1"
PREFIX = "sums-"


@dataclass(frozen=True)
class Done:
    """How far a capture is.

    Attributes:
        number: of the pass over all sequences, from 1.
        sequences: that have been through it.
        folder: with the parts of all ranks.
    """

    number: int
    sequences: int
    folder: Path


class RankStore:
    """The folder of one capture.

    Args:
        folder, facts, pace: as of `StateFile`.

    Raises:
        StorageError: the disk refused.
    """

    def __init__(
        self, folder: Path, facts: Mapping[str, str], pace: tuple[float, float] | None = None
    ) -> None:
        self._state = StateFile(folder, SCHEMA, facts, pace)
        self._serial = 0

    def load(self) -> Done | None:
        """The last saved sums, or `None`.

        Raises:
            OutputExists: it belongs to other facts.
            IntegrityError: it is no state of this version, or its sums are gone.
        """
        with self._state.opened() as state:
            if state is None:
                return None
            number, sequences = map(int, state["position"])
            done = Done(number, sequences, self._place(int(state["serial"])))
            if not done.folder.is_dir():
                raise ValueError(f"{done.folder.name} is missing")
            self._serial = int(state["serial"])
        return done

    def clear(self) -> None:
        """Forget what is there."""
        self._state.clear()
        self._sweep(keep=None)

    def due(self) -> bool:
        """Whether enough was done since the last save."""
        return self._state.due()

    def save(self, number: int, sequences: int, write: Callable[[Path], None]) -> None:
        """Replace what was saved.

        Args:
            number, sequences: see `Done`.
            write: lets every rank write its part into the folder it is given, forced to disk.

        Raises:
            StorageError: the disk refused.
        """
        with self._state.saving() as state:
            place = self._place(self._serial + 1)
            durable.remove_tree(place)  # left by a kill before the state named it
            place.mkdir()
            write(place)
            durable.sync_folder(place)
            durable.sync_folder(place.parent)
            self._serial += 1
            state.update(position=[number, sequences], serial=self._serial)
        self._sweep(keep=place)

    def _place(self, serial: int) -> Path:
        return self._state.folder / f"{PREFIX}{serial}"

    def _sweep(self, keep: Path | None) -> None:
        for path in self._state.folder.glob(f"{PREFIX}*"):
            if path != keep:
                durable.remove_tree(path)
        durable.sweep(self._state.folder)
