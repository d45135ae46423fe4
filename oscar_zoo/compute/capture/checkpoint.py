"""What an interrupted capture needs to go on: finished sums, and hidden states if they are small.

`state.py` decides whether a folder may be resumed. No file is larger than `LARGEST` bytes. When the
hidden states would be larger, a resumed capture repeats the forward passes up to its layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from oscar_zoo.artifact import durable
from oscar_zoo.compute.capture.state import StateFile
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, load_moments, moments_bytes

SCHEMA = "oscar-zoo.capture/1"
SUFFIX = ".safetensors"
LARGEST = 256 << 20

SUMS = (*ROW_SUMS, *WEIGHTED_SUMS)
COUNTS = ("tokens", "query_rows", "output_rows", "weighted_tokens")


@dataclass(frozen=True)
class Position:
    """How far an engine is: its step, and the finished layers or sequences of that step."""

    phase: str
    done: int


@dataclass(frozen=True)
class Saved:
    """An interrupted capture.

    Attributes:
        position: how far the capture was.
        layers: its sums, on the CPU.
        hidden: hidden states of every sequence, if they were saved.
    """

    position: Position
    layers: dict[int, LayerMoments]
    hidden: tuple[Tensor, ...] | None


class Checkpoint:
    """The folder of one process.

    Args:
        folder: of this process alone; created when it is missing.
        info: of the partial moments; `sequences` are all of this process.
    """

    def __init__(self, folder: Path, facts: Mapping[str, str], info: MomentsInfo) -> None:
        self._state = StateFile(folder, SCHEMA, facts)
        self._folder = folder
        self._info = info
        self._parts: list[str] = []
        self._serial = 0

    def load(self) -> Saved | None:
        """The saved state, or `None` when nothing was saved yet; later saves add to it."""
        with self._state.opened() as state:
            if state is None:
                return None
            hidden = state["hidden"] and load((self._folder / state["hidden"]).read_bytes())
            saved = Saved(
                Position(*state["position"]),
                {
                    i: one
                    for name in state["moments"]
                    for i, one in load_moments(self._folder / name)[0].layers.items()
                },
                tuple(hidden[str(number)] for number in range(len(hidden))) if hidden else None,
            )
            self._parts, self._serial = state["moments"], state["serial"]
        return saved

    def clear(self) -> None:
        """Remove the saved state."""
        self._state.clear()
        self._parts = []
        self._sweep(())

    def due(self) -> bool:
        """Whether enough was done since the last save."""
        return self._state.due()

    def save(
        self,
        position: Position,
        layers: Mapping[int, LayerMoments],
        *,
        sequences: int,
        add: bool,
        hidden: Sequence[Tensor] = (),
    ) -> None:
        """Replace the state.

        Args:
            sequences: number of sequences in the sums, from the first on.
            hidden: of every sequence; written when they are few.
        """
        with self._state.saving() as state:
            self._serial += 1
            self._parts = [*(self._parts if add else ()), *self._write(layers, sequences)]
            few = 0 < sum(one.nbytes for one in hidden) <= LARGEST
            rows = {
                str(number): one.cpu().contiguous()
                for number, one in enumerate(hidden if few else ())
            }
            name = self._store("hidden", save(rows)) if few else None
            state.update(
                position=[position.phase, position.done],
                moments=self._parts,
                hidden=name,
                serial=self._serial,
            )
        self._sweep([*self._parts, name])

    def _write(self, layers: Mapping[int, LayerMoments], sequences: int) -> Iterator[str]:
        """Write sums, with as many layers per file as its size limit allows."""
        info = self._info.model_copy(update={"sequences": self._info.sequences[:sequences]})
        size = max(
            (sum(getattr(one, name).nbytes for name in SUMS) for one in layers.values()), default=1
        )
        ids, at_once = sorted(layers), max(1, LARGEST // size)
        for start in range(0, len(ids), at_once):
            chosen = {layer: layers[layer] for layer in ids[start : start + at_once]}
            content = moments_bytes(Moments(self._info.model.geometry, chosen), info)
            yield self._store(f"moments-{ids[start]}", content)

    def _store(self, what: str, content: bytes) -> str:
        name = f"{what}-{self._serial}{SUFFIX}"
        (self._folder / name).unlink(missing_ok=True)  # left by a kill before the state named it
        durable.write_new(self._folder / name, content)
        return name

    def _sweep(self, keep: Sequence[str | None]) -> None:
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path.name not in keep:
                path.unlink()
        durable.sweep(self._folder)
