"""What an interrupted capture needs to go on: finished sums, and hidden states if they are small.

Files are written first. Then `state.json` is replaced in one step, after they are on disk, so a
kill at any time leaves either the state before or the state after. A state belongs to one model,
data set and set of options, and any other capture is refused. No file is larger than `LARGEST`
bytes: when the hidden states would be, a resumed capture repeats the forward passes up to its
layer. Saving takes at most about a twentieth of the time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.names import path_text
from oscar_zoo.compute.moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments, Moments
from oscar_zoo.compute.moments_file import MomentsInfo, load_moments, moments_bytes
from oscar_zoo.errors import IntegrityError, OutputExists
from oscar_zoo.next_step import AddOption

STORE = "capture"
"""Folder with the state of a capture, in that of the work."""
STATE, SCHEMA, SUFFIX = "state.json", "oscar-zoo.capture/1", ".safetensors"
DATA = "data"
"""The fact that says which text was captured."""
MIN_SECONDS = 1.0
"""Between two saves, at least."""
SHARE = 20
"""Time of work for one of saving."""
LARGEST = 256 << 20
SUMS = (*ROW_SUMS, *WEIGHTED_SUMS)


@dataclass(frozen=True)
class Saved:
    """An interrupted capture: its phase with the finished layers or sequences of that, its sums on
    the CPU, and hidden states of every sequence, if they were saved."""

    phase: str
    done: int
    layers: dict[int, LayerMoments]
    hidden: tuple[Tensor, ...] | None


class Checkpoint:
    """The folder of one capture, which is created when it is missing. `facts` are everything that
    decides the bits of the sums, in words, `info` is of the partial moments."""

    def __init__(self, folder: Path, facts: Mapping[str, str], info: MomentsInfo) -> None:
        self._folder, self._facts, self._info = folder, dict(facts), info
        self._parts: list[str] = []
        self._serial = 0
        self._last, self._took = time.monotonic(), 0.0
        with durable.storage_errors(f"cannot write to {folder}"):
            durable.make_folders(folder)

    def load(self) -> Saved | None:
        """The saved state, or `None` when nothing was saved yet; later saves add to it."""
        path = self._folder / STATE
        if not path.is_file():
            return None
        try:
            state: Any = strict_json.loads(path.read_bytes(), what=str(path))
            if state["schema"] != SCHEMA:
                raise ValueError(f"its schema is {str(state['schema'])[:60]!r}, not {SCHEMA}")
            for name, mine in self._facts.items():
                if state["facts"][name] != mine:
                    raise _another(self._folder, name, state["facts"][name], mine)
            hidden = state["hidden"] and load((self._folder / state["hidden"]).read_bytes())
            layers: dict[int, LayerMoments] = {}
            for name in state["moments"]:
                layers |= load_moments(self._folder / name)[0].layers
            states = tuple(hidden[str(at)] for at in range(len(hidden))) if hidden else None
            phase, done = state["position"]
            saved = Saved(phase, done, layers, states)
            self._parts, self._serial = state["moments"], state["serial"]
        except OutputExists:
            raise
        except (LookupError, TypeError, ValueError, OSError, SafetensorError) as error:
            raise IntegrityError(
                f"{path} cannot be resumed: {str(error)[:200].rstrip('.')}.",
                next_step=AddOption("--no-resume"),
            ) from None
        return saved

    def clear(self) -> None:
        """Remove the saved state."""
        (self._folder / STATE).unlink(missing_ok=True)
        self._parts = []
        self._sweep(())

    def due(self) -> bool:
        """Whether enough work is done since the last save to save again."""
        return time.monotonic() - self._last >= max(MIN_SECONDS, SHARE * self._took)

    def save(
        self,
        phase: str,
        done: int,
        layers: Mapping[int, LayerMoments],
        *,
        sequences: int,
        add: bool,
        hidden: Sequence[Tensor] = (),
    ) -> None:
        """Replace the state. `sequences` are summed, from the first on; the sums of these layers
        are all, or to `add` to those that were saved before; `hidden` states are written when they
        are few."""
        began = time.monotonic()
        with durable.storage_errors(f"cannot write to {self._folder}"):
            self._serial += 1
            self._parts = [*(self._parts if add else ()), *self._write(layers, sequences)]
            name = None
            if 0 < sum(one.nbytes for one in hidden) <= LARGEST:
                rows = {str(at): one.cpu().contiguous() for at, one in enumerate(hidden)}
                name = self._store("hidden", save(rows))
            state = {
                "schema": SCHEMA,
                "facts": self._facts,
                "position": [phase, done],
                "moments": self._parts,
                "hidden": name,
                "serial": self._serial,
            }
            durable.replace_file(self._folder / STATE, strict_json.canonical_bytes(state))
        self._last = time.monotonic()
        self._took = self._last - began
        self._sweep([*self._parts, name])

    def _write(self, layers: Mapping[int, LayerMoments], sequences: int) -> Iterator[str]:
        """Write sums, with as many layers per file as its size limit allows."""
        info = self._info.model_copy(update={"sequences": self._info.sequences[:sequences]})
        sizes = (sum(getattr(one, name).nbytes for name in SUMS) for one in layers.values())
        ids, at_once = sorted(layers), max(1, LARGEST // max(sizes, default=1))
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


def can_resume(work: Path) -> bool:
    """Whether an interrupted run left a state in `work` that a capture can go on from."""
    return (work / STORE / STATE).exists()


@contextmanager
def kept_for_resume(work: Path, anew: bool = False) -> Iterator[None]:
    """Keep `work` when the body fails and a capture can be resumed from it; remove it otherwise.
    The run was asked to begin `anew`."""
    missing = [folder for folder in work.absolute().parents if not folder.exists()]
    done = False
    try:
        yield
        done = True
    except (KeyboardInterrupt, SystemExit) as error:  # Ctrl-C and SIGTERM
        if can_resume(work):
            kept = f"what was captured is kept in {path_text(work)}; the same command"
            error.add_note(kept + " without --no-resume" * anew + " goes on from there")
        raise
    finally:
        if done or not can_resume(work):
            durable.remove_tree(work / STORE)
            for folder in (work, *missing):
                # a folder stays when it holds other files, such as the artifact
                with suppress(OSError):
                    folder.rmdir()


def weights_digest(parameters: Iterable[Tensor]) -> str:
    """A digest of the first numbers of every tensor: enough to tell checkpoints of one
    configuration apart."""
    digest = hashlib.sha256()
    for one in parameters:
        if one.is_meta or not one.numel():  # may be elsewhere
            continue
        row = one.detach()[(0,) * (one.dim() - 1)] if one.dim() else one.detach().reshape(1)
        digest.update(row[:8].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _another(folder: Path, name: str, theirs: str, mine: str) -> OutputExists:
    """The error when a state belongs to another capture."""
    of = f"with {name} {theirs}, this one has {mine}"
    if name == DATA:
        of = "of another calibration text, or of other tokens of this one"
    return OutputExists(
        f"{folder} holds a capture {of}.",
        hint="give what that run had, another output folder, or start again with --no-resume",
    )
