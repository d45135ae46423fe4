"""What the name of a model means: a folder, a name of the zoo, or an id on a model hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.names import (
    cached_model,
    check_part,
    check_utf8,
    is_path,
    path_text,
    safe_part,
)
from oscar_zoo.errors import InvalidName, OscarZooError, PathNotFound, UsageError
from oscar_zoo.registry.catalog import Catalog
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
        recipe: what the zoo knows about it, or `None`.
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
    as an alias.
    """
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

    No folder is looked at: the name of a local model means nothing on another machine.
    """
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

    Names that the zoo knows mean one model everywhere; a folder may have any name.
    """
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
