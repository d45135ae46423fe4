"""What a text means where a verb takes a path, a name or a model. Text is parsed here, once.

How a text is written decides what it is, never what happens to lie in the current folder; see
`artifact.names.is_path`. A file or folder with the name of an artifact is mentioned in a note or in
the error, so that nobody wonders.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import (
    Reference,
    cached_model,
    check_part,
    check_utf8,
    is_path,
    path_text,
    safe_part,
)
from oscar_zoo.errors import (
    ArtifactNotFound,
    InvalidName,
    NetworkError,
    NotFoundError,
    OscarZooError,
    PathNotFound,
    RepositoryNotFound,
    RevisionNotFound,
    UsageError,
)
from oscar_zoo.next_step import SuggestedPath
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs import table
from oscar_zoo.registry.known_names import aliased
from oscar_zoo.registry.recipe import ModelRecipe


@dataclass(frozen=True)
class ModelChoice:
    """A model to load.

    Attributes:
        source: local folder or hub id, as the loaders take it.
        model_id: identity recorded in manifests: the recipe's hub id, else the hub id or folder
            name given.
        name: folder-safe base name, first part of artifact ids.
        notes: one sentence where something else has the same name.
    """

    source: str
    model_id: str
    name: str
    recipe: ModelRecipe | None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_part(self.name, "model name")

    @property
    def on_no_hub(self) -> bool:
        """Whether `source` is the id of a model that no hub has."""
        return (
            self.recipe is not None and not self.recipe.on_hub and self.source == self.recipe.hf_id
        )

    def is_called(self, name: str) -> bool:
        """Whether `name`, with or without an organisation, means a model of this name."""
        recipe = Catalog.packaged().recipe(name)
        wanted = recipe.name if recipe else name.rpartition("/")[2]
        return self.name.casefold() == wanted.casefold()

    def check_can_be_had(self, again: str) -> None:
        """Refuse a model that is on no hub and was not given as a folder."""
        if self.on_no_hub:
            raise UsageError(
                f"the checkpoint of {self.name} is on no hub.", hint=f"give its folder: {again}"
            )


def choose_model(model: str | Path) -> ModelChoice:
    """Find out what `model` means.

    A `Path`, or a text written as a path, is a folder. Otherwise a name of the zoo wins. An id such
    as `Qwen/Qwen3-8B` means a folder of that name with a `config.json`, as it does for transformers
    and SGLang. A name that the zoo does not know may mean a folder too, or one version that has it
    as an alias."""
    if isinstance(model, str) and not is_path(model):
        return _named(model)
    return model_in_folder(Path(model).expanduser())


def model_called(name: str) -> ModelChoice | None:
    """The model that `name` alone means: a model of the zoo, or an id such as `Qwen/Qwen3-8B` on a
    hub or of a folder here. `None` for any other name."""
    recipe, path = Catalog.packaged().recipe(name), Path(name)
    hub_id = recipe.hf_id if recipe else name
    if hub_id.count("/") == 1 and holds_model(Path(hub_id)):
        choice = model_in_folder(Path(hub_id), recipe)
        note = f"{hub_id} is the folder {choice.source} here, not the model of that id on a hub"
        return replace(choice, notes=(note,))
    if recipe is not None:
        notes = (namesake_note(path),) if holds_model(path) else ()
        return ModelChoice(recipe.hf_id, recipe.hf_id, recipe.name, recipe, notes)
    if name.count("/") == 1 and not os.path.isfile(path):  # noqa: PTH113 (any text: no errors)
        return ModelChoice(name, name, name.rpartition("/")[2], None)
    return None


def model_in_folder(path: Path, recipe: ModelRecipe | None = None) -> ModelChoice:
    """The model in the folder `path`.

    Args:
        recipe: what the zoo knows about it; default what it knows about a model of the folder's
            name.
    """
    if path.is_file():
        raise UsageError(
            f"{path} is a file, not a model folder.", hint="give the folder that holds config.json"
        )
    # written as a path, or a loader could take it for the id of a model on a hub
    source = path_text(path)
    if not path.is_dir():
        raise PathNotFound.for_path(source, "model folder")
    check_utf8(path.absolute(), "the path of a model, for the libraries that load it,")
    cached = cached_model(path.resolve())
    model_id = cached[0] if cached else safe_part(path.resolve().name)
    recipe = recipe or Catalog.packaged().recipe(model_id)
    if recipe is None:
        return ModelChoice(source, model_id, safe_part(model_id.rpartition("/")[2]), None)
    return ModelChoice(source, recipe.hf_id, recipe.name, recipe)


def _named(name: str) -> ModelChoice:
    """The model that `name` means, which is not written as a path; see `choose_model`."""
    choice, path = model_called(name), Path(name)
    if choice is not None:
        return choice
    if holds_model(path):
        return model_in_folder(path)
    version = aliased(name)
    recipe = None if version is None else Catalog.packaged().recipe(version.model)
    choice = None if recipe is None else model_called(recipe.name)
    if choice is None:
        close = Catalog.packaged().close_matches(name)
        raise _unknown(name, close)
    return choice


def recorded_model(model_id: str) -> ModelChoice:
    """The model of a manifest or moments file, by the identity recorded there.

    No folder is looked at: the name of a local model means nothing on another machine."""
    recipe = Catalog.packaged().recipe(model_id)
    name = recipe.name if recipe else safe_part(model_id.rpartition("/")[2])
    return ModelChoice(model_id, model_id, name, recipe)


def holds_model(path: Path) -> bool:
    """Whether `path` is a folder with a `config.json`."""
    return os.path.isfile(path / "config.json")  # noqa: PTH113 (any text: no errors)


def namesake_note(place: Path) -> str:
    """The note that a name was taken although the file or folder `place` has the same name."""
    kind = "folder" if place.is_dir() else "file"
    return f"{place} is taken as a name; the {kind} of that name is {quote(path_text(place))}"


def _unknown(text: str, close: Sequence[str]) -> OscarZooError:
    """The error for a `text` that is no model, with what may have been meant."""
    path = Path(text)
    if os.path.isfile(text):  # noqa: PTH113 (any text: no errors)
        return UsageError(
            f"{text[:200]} is a file, not a model folder.",
            hint="give the folder that holds config.json",
        )
    hint = "give a folder, an id such as Qwen/Qwen3-8B, or a name of the zoo"
    if os.path.isdir(text):  # noqa: PTH112 (any text: no errors)
        empty = "" if holds_model(path) else ", which has no config.json"
        hint = f"did you mean the folder {path_text(path)}{empty}?"
    elif close:
        return PathNotFound(f"no model is called {text!r}.", suggestions=close)
    return PathNotFound(f"no model is called {text!r}.", hint=hint)


def check_made_for(choice: ModelChoice, manifest: Manifest | None) -> None:
    """Refuse the artifact of a folder's name when it was computed for another model of that name.

    Names that the zoo knows mean one model everywhere; a folder may have any name."""
    made_for = manifest.model.config_sha256 if manifest else None
    if made_for is None or choice.recipe is not None:
        return
    folder = Path(choice.source)
    if made_for != sha256_hex((folder / "config.json").read_bytes()):
        raise UsageError(
            f"{manifest.id if manifest else 'it'} was made for another model than {folder}:"
            " config.json differs.",
            hint="give the folder a name of its own",
        )


def check_model_id(text: str) -> None:
    """Refuse what cannot be the id of a model, `ORG/NAME` or `NAME`; raises `InvalidName`."""
    parts = text.split("/")
    if len(parts) > 2:
        raise InvalidName(f"{text[:120]!r} is not a model id.", hint="ids look like Qwen/Qwen3-8B")
    for part in parts:
        check_part(part, "model id")


@dataclass(frozen=True)
class PathTarget:
    """A file, an artifact folder or a tree of them; nothing needs to be there yet."""

    text: str
    path: Path

    @property
    def choice(self) -> None:
        """The model that the text alone means: none."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ModelTarget:
    """A folder that holds a model and is no artifact. It stands for the artifact of its name."""

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


_NO_HUB = (PathNotFound, RepositoryNotFound, RevisionNotFound)
"""Errors of a hub that is not there: another name would not be found on it either."""


@contextmanager
def looking_up(target: Target, observer: Observer) -> Iterator[None]:
    """While `target` is looked up: mention its namesake, in the error or in a note."""
    place = target.namesake if isinstance(target, NameTarget) else None
    try:
        yield
    except (NotFoundError, NetworkError, InvalidName) as error:
        mention_namesake(place, error, observer)
        raise
    mention_namesake(place, None, observer)


def mention_namesake(place: Path | None, error: OscarZooError | None, observer: Observer) -> None:
    """Mention, after a look-up, that `place` has the name that was looked up.

    Args:
        place: a file or folder, or `None`, which needs no mention.
        error: what the look-up raised; it asks whether `place` was meant, unless the hub itself is
            missing. With `None` the observer hears a note.
    """
    if place is None or isinstance(error, _NO_HUB):
        return
    if error is not None:
        suggest_path(place, error)
    else:
        observer.note(Note("target.namesake", namesake_note(place), {"path": str(place)}))
