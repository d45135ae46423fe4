"""What a text means where a use case takes a path or a name. Text is parsed here, once.

How a text is written decides what it is, never what happens to lie in the current folder; see
`artifact.names.is_path`. When a file or folder has the same name as an artifact, a note or the
error mentions it.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from oscar_zoo.app.progress import Note, Observer
from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.names import Reference, is_path, path_text
from oscar_zoo.errors import (
    ArtifactNotFound,
    InvalidName,
    OscarZooError,
    PathNotFound,
    UsageError,
)
from oscar_zoo.hubs import table
from oscar_zoo.next_step import SuggestedPath
from oscar_zoo.registry.model_names import (
    ModelChoice,
    choose_model,
    holds_model,
    model_called,
    model_in_folder,
)


@dataclass(frozen=True)
class PathTarget:
    """A file, an artifact folder or a tree of them; nothing needs to be there yet.

    Attributes:
        text: the target as it was written, for messages.
        path: where it is; `~` is expanded.
    """

    text: str
    path: Path

    @property
    def choice(self) -> None:
        """The model that the text alone means: none."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ModelTarget:
    """A folder that holds a model and is no artifact. It stands for the artifact of its name.

    Attributes:
        text: the target as it was written, for messages.
        choice: the model in it.
    """

    text: str
    choice: ModelChoice

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.choice.source)

    @property
    def reference(self) -> Reference:
        """The artifact that the folder stands for."""
        return Reference(self.choice.name)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class NameTarget:
    """The name of an artifact.

    Attributes:
        text: the target as it was written, for messages.
        reference: the parsed name.
        namesake: a file or folder of the current folder that has the same name, or `None`.
    """

    text: str
    reference: Reference
    namesake: Path | None = None

    @cached_property
    def choice(self) -> ModelChoice | None:
        """The model that the text alone means, if it means one."""
        return model_called(self.reference.name)

    @property
    def model_namesake(self) -> Path | None:
        """`namesake`, if it is a folder that holds a model and is no artifact."""
        return self.namesake if self.namesake and _is_model_folder(self.namesake) else None

    def __str__(self) -> str:
        return self.text


Target = PathTarget | ModelTarget | NameTarget


def parse(text: str | Path) -> Target:
    """Parse one target; a `Path` is always a path."""
    if isinstance(text, Path) or is_path(text):
        path = Path(text).expanduser()
        if _is_model_folder(path):
            return ModelTarget(str(text), model_in_folder(path))
        return PathTarget(str(text), path)
    namesake = Path(text) if os.path.lexists(text) else None
    try:
        return NameTarget(text, Reference.parse(text), namesake)
    except InvalidName:
        if namesake is None:
            if table.kind_of(text) is not None:
                raise _is_a_hub(text) from None
            raise
        error = ArtifactNotFound.for_name(text)
        suggest_path(namesake, error)
        raise error from None


def parse_named(text: str | Path) -> ModelTarget | NameTarget:
    """Parse a target that names an artifact, by itself or by a folder with a model; raises
    `UsageError` for any other path, and `PathNotFound` where nothing is there."""
    target = parse(text)
    if isinstance(target, PathTarget):
        raise _takes_a_name(target)
    return target


def parse_name(text: str) -> NameTarget:
    """Parse the name of an artifact; raises as `parse_named`, also for a folder with a model."""
    target = parse(text)
    if not isinstance(target, NameTarget):
        raise _takes_a_name(target)
    return target


def parse_model(model: str | Path, observer: Observer) -> ModelChoice:
    """Parse the name of a model, and note where something else has that name; raises as
    `choose_model`."""
    choice = choose_model(model)
    for text in choice.notes:
        observer.note(Note("model.namesake", text, {"model": choice.source}))
    return choice


def parse_given_model(
    model: str | Path | None, observer: Observer, *, again: str
) -> ModelChoice | None:
    """`parse_model` of the model that the user may have named, to run it."""
    if model is None:
        return None
    choice = parse_model(model, observer)
    choice.check_can_be_had(again)
    return choice


def suggest_path(place: Path, error: OscarZooError) -> None:
    """Let `error` ask whether `place` was meant."""
    kind = "folder" if place.is_dir() else "file"
    error.advise()
    error.suggestions = (SuggestedPath(path_text(place), kind),)


def _is_a_hub(text: str) -> InvalidName:
    return InvalidName(
        f"{text} is a hub, and this takes a name.",
        hint=f"a hub is given with --hub; what it has: oscar-zoo list --hub {shlex.quote(text)}",
    )


def _takes_a_name(target: PathTarget | ModelTarget) -> OscarZooError:
    """The error for a path in the place of a name, with a command that takes this path."""
    if isinstance(target, ModelTarget):
        known = target.choice.recipe is not None
        make = f"oscar-zoo compute {shlex.quote(target.text)} makes a rotation for this model"
        hint = f"the name of this model: {target.choice.name}" if known else make
    elif not os.path.lexists(target.path):
        hint = "check the path, or give a name: oscar-zoo list"
        return PathNotFound(f"no such file or folder: {target}", hint=hint)
    elif target.path.is_dir() and not _holds_artifacts(target.path):
        hint = "name another folder, or an artifact: oscar-zoo list"
        return PathNotFound(f"no model (config.json) and no rotations in {target}.", hint=hint)
    else:
        hint = f"it is here already: oscar-zoo verify {shlex.quote(target.text)}"
    return UsageError(f"{target} is a path; this takes a name.", hint=hint)


def _is_model_folder(path: Path) -> bool:
    """Whether `path` holds a model and is no artifact itself; what lies deeper changes nothing."""
    from oscar_zoo.artifact.artifact_folder import is_artifact

    return holds_model(path) and not (path / FILE_NAME).exists() and not is_artifact(path)


def _holds_artifacts(path: Path) -> bool:
    from oscar_zoo.artifact.artifact_folder import find_artifacts

    return bool(find_artifacts(path))
