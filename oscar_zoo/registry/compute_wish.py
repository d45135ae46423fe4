"""What `pull` and `serve` may compute when nobody has published an artifact, and how an error names
that as the next step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact.names import is_path, path_text
from oscar_zoo.errors import (
    ArtifactNotFound,
    NetworkError,
    OfflineError,
    OscarZooError,
    UsageError,
)
from oscar_zoo.next_step import Compute
from oscar_zoo.registry.arguments import command_line, option_words
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.targets import ModelChoice, ModelTarget, NameTarget


@dataclass(frozen=True)
class ComputeWish:
    """What a caller wants when nobody has published an artifact.

    Attributes:
        ask: otherwise, ask the observer whether to compute one.
        calib_data, device, revision: as in `ComputeRequest`; `None` for its defaults.
        to_serve: the artifact is wanted for a server, so a model that `serve` refuses is an error.
    """

    compute: bool = False
    ask: bool = False
    calib_data: str | None = None
    device: str | None = None
    revision: str | None = None
    offline: bool = False
    to_serve: bool = False

    def may_compute(self, error: OscarZooError) -> bool:
        """Whether to compute one, or to ask for that, after a search gave `error`."""
        return self.compute or (self.ask and isinstance(error, ArtifactNotFound | OfflineError))

    def check(self) -> None:
        """Raise `UsageError` when the wish makes no sense or cannot be met in this process."""
        if self.calib_data and not self.compute:
            raise UsageError(
                "--calib-data goes with --compute.", hint="add --compute, or leave it out"
            )


def computing(choice: ModelChoice, sources: Sources, *, offline: bool = False) -> Compute:
    """The next step for a command that does not compute: an artifact for the model `choice`, under
    the name that the command looks for."""
    words = option_words({"hub": sources.named, "compute": True, "offline": offline})
    return Compute(choice.name, command_line(["pull", choice.source, *words]))


def model_to_compute(
    target: ModelTarget | NameTarget, error: OscarZooError, model: ModelChoice | None = None
) -> ModelChoice | None:
    """The model from which an artifact for `target` can be made, after a search gave `error`.

    Args:
        model: where the model's weights are, if the caller said so; it must have the same name.

    Returns:
        `None` when the error says something else, when the target names one version, and when no
        model is meant.
    """
    if not isinstance(error, ArtifactNotFound | NetworkError):
        return None
    reference = target.reference
    if reference.tag is not None or reference.digest is not None:
        return None
    if model is None:
        model = target.choice
    return model if model is not None and model.is_called(reference.name) else None


def tell_of_folder(target: ModelTarget | NameTarget, error: OscarZooError) -> None:
    """Let the `error` of a search for the artifact of a model's folder begin with what the folder
    is. What it suggests goes: the next step is to compute one."""
    if not isinstance(target, ModelTarget):
        return
    if isinstance(error, NetworkError) and error.said is not None:
        why = f" on this machine, and not every hub could be asked ({error.said.rstrip('.')})."
    elif isinstance(error, OfflineError):
        why = " on this machine, and offline mode asks no hub."
    elif isinstance(error, ArtifactNotFound):
        why = " known."
    else:
        return
    error.message = f"{target} is a model; no rotation for it is{why}"
    error.args = (error.message,)
    error.advise()


def propose_computing(choice: ModelChoice, error: OscarZooError, again: Callable[..., str]) -> None:
    """Let the `error` of a search name computing an artifact of `choice` as the next step, where
    that is what the user may have meant.

    Args:
        again: the command line that means the same, with options to add or to replace.
    """
    from oscar_zoo.models.model_hub import is_here

    here, place = is_here(choice.source), Path(choice.source)
    slash = choice.recipe is None and "/" in choice.source and not is_path(choice.source)
    first = Path(choice.source.partition("/")[0])
    # a path without `./`: it exists, or the folder that it begins with does, and no such model
    if slash and (os.path.lexists(choice.source) or (first.is_dir() and not here)):
        if not os.path.lexists(place):
            error.advise(f"a path begins with ./, and nothing is at {path_text(place)}")
    elif here or not isinstance(error, NetworkError):
        online = {} if here else {"offline": False}  # the model has to be fetched
        error.next_step = Compute(choice.name, again(compute=True, **online))
        if slash and not (here or error.suggestions or error.advice):
            error.advice = f"a folder would be written {path_text(place)}"
