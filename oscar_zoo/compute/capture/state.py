"""`state.json` of an interrupted capture: what is done, in which files, and of which capture.

The files are written first. Then the state is replaced in one step, after the files are on disk, so
a kill at any time leaves either the state before or the state after. A state belongs to one model,
data set and set of options, and any other capture is refused. Saving takes at most about a
twentieth of the time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.errors import IntegrityError, OutputExists
from oscar_zoo.next_step import AddOption

STATE = "state.json"
DATA = "data"
"""The fact that says which text was captured."""
MIN_SECONDS = 1.0
"""Between two saves, at least."""
SHARE = 20
"""Time of work for one of saving."""


class StateFile:
    """The state of one folder.

    Args:
        pace: `(MIN_SECONDS, SHARE)`, when they differ from those of this process.
    """

    def __init__(
        self,
        folder: Path,
        schema: str,
        facts: Mapping[str, str],
        pace: tuple[float, float] | None = None,
    ) -> None:
        self.folder = folder
        self._schema = schema
        self._facts = dict(facts)
        self._pace = pace
        self._last, self._took = time.monotonic(), 0.0
        with durable.storage_errors(f"cannot write to {folder}"):
            durable.make_folders(folder)

    @contextmanager
    def opened(self) -> Iterator[dict[str, Any] | None]:
        """The last saved state, or `None`; the body may read the files that it names."""
        path = self.folder / STATE
        if not path.is_file():
            yield None
            return
        try:
            state = strict_json.loads(path.read_bytes(), what=str(path))
            if state["schema"] != self._schema:
                raise ValueError(f"its schema is {str(state['schema'])[:60]!r}, not {self._schema}")
            self._refuse_others(state["facts"])
            yield state
        except OutputExists:
            raise
        except (LookupError, TypeError, ValueError, OSError, SafetensorError) as error:
            raise unusable(path, str(error)) from None

    def clear(self) -> None:
        """Remove the saved state."""
        (self.folder / STATE).unlink(missing_ok=True)

    def due(self) -> bool:
        """Whether enough work is done since the last save to save again."""
        least, share = self._pace or (MIN_SECONDS, SHARE)
        return time.monotonic() - self._last >= max(least, share * self._took)

    @contextmanager
    def saving(self) -> Iterator[dict[str, Any]]:
        """Save a new state: the body writes the files and fills in their names."""
        began = time.monotonic()
        state: dict[str, Any] = {"schema": self._schema, "facts": self._facts}
        with durable.storage_errors(f"cannot write to {self.folder}"):
            yield state
            durable.replace_file(self.folder / STATE, strict_json.canonical_bytes(state))
        self._last = time.monotonic()
        self._took = self._last - began

    def _refuse_others(self, theirs: Mapping[str, str]) -> None:
        for name, mine in self._facts.items():
            if theirs[name] != mine:
                raise another(self.folder, name, theirs[name], mine)


def facts_in(path: Path) -> Mapping[str, Any]:
    """The facts of the state `path`; empty where it cannot be read."""
    try:
        facts = strict_json.loads(path.read_bytes(), what=str(path))["facts"]
    except (LookupError, TypeError, ValueError, OSError):
        return {}
    return facts if isinstance(facts, dict) else {}


def another(folder: Path, name: str, theirs: str, mine: str) -> OutputExists:
    """The error when a state belongs to another capture."""
    if name == DATA:
        of = "of another calibration text, or of other tokens of this one"
        return OutputExists(
            f"{folder} holds a capture {of}.",
            hint="give the text and the tokens of that run, or start again with --no-resume",
        )
    return OutputExists(
        f"{folder} holds a capture with {name} {theirs}, this one has {mine}.",
        hint="name another output folder, or start again with --no-resume",
    )


def unusable(path: Path, why: str) -> IntegrityError:
    """The error when a state or one of its files is damaged."""
    return IntegrityError(
        f"{path} cannot be resumed: {why[:200].rstrip('.')}.", next_step=AddOption("--no-resume")
    )


def weights_digest(parameters: Iterable[Tensor]) -> str:
    """A digest of the first numbers of every tensor.

    That is enough to tell checkpoints of one configuration apart.
    """
    digest = hashlib.sha256()
    for one in parameters:
        if one.is_meta or not one.numel():  # may be elsewhere
            continue
        row = one.detach()[(0,) * (one.dim() - 1)] if one.dim() else one.detach().reshape(1)
        digest.update(row[:8].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
