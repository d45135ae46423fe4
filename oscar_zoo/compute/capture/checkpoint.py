"""What an interrupted capture needs to go on, in a folder: sums of what is done, and hidden states while they are few.

`state.json` names files that belong together and is replaced in one step after they are on disk, so a kill at any
time leaves the state before or the one after. The state belongs to one model, data set and set of options; those of
another are refused. No file is larger than `LARGEST` bytes: where the hidden states are, the forward passes up to the
layer are repeated instead. Saving takes at most about a twentieth of the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.compute.moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments, Moments
from oscar_zoo.compute.moments_file import MomentsInfo, load_moments, moments_bytes
from oscar_zoo.errors import IntegrityError, OutputExists

SCHEMA = "oscar-zoo.capture/1"
STATE = "state.json"
SUFFIX = ".safetensors"
LARGEST = 256 << 20
MIN_SECONDS = 1.0
"""Between two saves, at least."""
SHARE = 20
"""Time of work for one of saving."""

SUMS = (*ROW_SUMS, *WEIGHTED_SUMS)
COUNTS = ("tokens", "query_rows", "output_rows", "weighted_tokens")


@dataclass(frozen=True)
class Position:
    """Where an engine is: what it does, and how many layers or sequences of that are done."""

    phase: str
    done: int


@dataclass(frozen=True)
class Saved:
    """An interrupted capture.

    Attributes:
        position: where it stood.
        layers: its sums, on the CPU.
        hidden: of every sequence, where they were saved.
    """

    position: Position
    layers: dict[int, LayerMoments]
    hidden: tuple[Tensor, ...] | None


class Checkpoint:
    """The folder of one process.

    Args:
        folder: of this process alone; created when it is missing.
        facts: what the state belongs to, in words.
        info: of the partial moments; `sequences` are all of this process.

    Raises:
        StorageError: the disk refused.
    """

    def __init__(self, folder: Path, facts: Mapping[str, str], info: MomentsInfo) -> None:
        self._folder = folder
        self._facts = dict(facts)
        self._info = info
        self._parts: list[str] = []
        self._serial = 0
        self._last, self._took = time.monotonic(), 0.0
        with durable.storage_errors(f"cannot write to {folder}"):
            durable.make_folders(folder)

    def load(self) -> Saved | None:
        """What is there, or `None` when nothing was saved yet; later saves add to it.

        Raises:
            OutputExists: it belongs to other facts.
            IntegrityError: it is no state of this version, or damaged.
        """
        path = self._folder / STATE
        if not path.is_file():
            return None
        try:
            state = strict_json.loads(path.read_bytes(), what=str(path))
            if state["schema"] != SCHEMA:
                raise ValueError(f"its schema is {str(state['schema'])[:60]!r}, not {SCHEMA}")
            self._refuse_others(state["facts"])
            hidden = state["hidden"] and load((self._folder / state["hidden"]).read_bytes())
            saved = Saved(
                Position(*state["position"]),
                {i: one for name in state["moments"] for i, one in load_moments(self._folder / name)[0].layers.items()},
                tuple(hidden[str(number)] for number in range(len(hidden))) if hidden else None,
            )
        except OutputExists:
            raise
        except (LookupError, TypeError, ValueError, OSError, SafetensorError) as error:
            raise IntegrityError(
                f"{path} cannot be resumed: {str(error)[:200]}.", hint="start again without --resume"
            ) from None
        self._parts, self._serial = state["moments"], state["serial"]
        return saved

    def clear(self) -> None:
        """Forget what is there."""
        (self._folder / STATE).unlink(missing_ok=True)
        self._parts = []
        self._sweep(())

    def due(self) -> bool:
        """Whether enough was done since the last save."""
        return time.monotonic() - self._last >= max(MIN_SECONDS, SHARE * self._took)

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
            position: what is done.
            layers: sums to write.
            sequences: that are in them, from the first on.
            add: whether they come beside sums of other layers that were saved before.
            hidden: of every sequence; written when they are few.

        Raises:
            StorageError: the disk refused.
        """
        began = time.monotonic()
        with durable.storage_errors(f"cannot write to {self._folder}"):
            self._serial += 1
            self._parts = [*(self._parts if add else ()), *self._write(layers, sequences)]
            few = 0 < sum(one.nbytes for one in hidden) <= LARGEST
            rows = {str(number): one.cpu().contiguous() for number, one in enumerate(hidden if few else ())}
            name = self._store("hidden", save(rows)) if few else None
            state = {
                "schema": SCHEMA,
                "facts": self._facts,
                "position": [position.phase, position.done],
                "moments": self._parts,
                "hidden": name,
                "serial": self._serial,
            }
            durable.replace_file(self._folder / STATE, strict_json.canonical_bytes(state))
            self._sweep([*self._parts, name])
        self._last = time.monotonic()
        self._took = self._last - began

    def _write(self, layers: Mapping[int, LayerMoments], sequences: int) -> Iterator[str]:
        """Store sums, as many layers in a file as it may hold."""
        info = self._info.model_copy(update={"sequences": self._info.sequences[:sequences]})
        size = max((sum(getattr(one, name).nbytes for name in SUMS) for one in layers.values()), default=1)
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

    def _refuse_others(self, theirs: Mapping[str, str]) -> None:
        for name, mine in self._facts.items():
            if theirs[name] != mine:
                raise OutputExists(
                    f"{self._folder} holds a capture with {name} {theirs[name]}, this one has {mine}.",
                    hint="name another work folder, or start again without --resume",
                )

    def _sweep(self, keep: Sequence[str | None]) -> None:
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path.name not in keep:
                path.unlink()
        durable.sweep(self._folder)
