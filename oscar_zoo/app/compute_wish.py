"""What `pull` and `serve` may compute when nobody has published an artifact."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.app.arguments import command_line, option_words
from oscar_zoo.errors import (
    ArtifactNotFound,
    NetworkError,
    OfflineError,
    OscarZooError,
    UsageError,
)
from oscar_zoo.next_step import Compute
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.targets import ModelChoice, ModelTarget, NameTarget


@dataclass(frozen=True)
class ComputeWish:
    """What a caller wants when nobody has published an artifact.

    Attributes:
        compute: compute one without a question.
        ask: otherwise, ask the observer whether to compute one.
        calib_data, device, revision: as in `ComputeRequest`; `None` for its defaults.
        offline: send no request.
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
