"""What `MODEL` on a command line means: a folder, a recipe's name, or an id on a model hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.names import check_part
from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe
from oscar_zoo.errors import InvalidName, PathNotFound, UsageError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.recipe import ModelRecipe


@dataclass(frozen=True)
class ModelChoice:
    """A model to load.

    Attributes:
        source: local folder or hub id, as the loaders take it.
        model_id: identity recorded in manifests: the recipe's hub id, else the hub id or folder name given.
        name: folder-safe base name, first part of artifact ids.
        recipe: what the zoo knows about it, or `None`.
    """

    source: str
    model_id: str
    name: str
    recipe: ModelRecipe | None


def choose_model(text: str) -> ModelChoice:
    """Resolve `text`; raises `PathNotFound`, `UsageError` or `InvalidName` when it is neither folder nor hub id."""
    catalog = Catalog.packaged()
    path = Path(text).expanduser()
    if path.is_dir():
        name = path.resolve().name
        recipe = catalog.recipe(name)
        return ModelChoice(str(path), recipe.hf_id if recipe else name, recipe.name if recipe else _safe(name), recipe)
    if path.exists():
        raise UsageError(f"{text} is a file, not a model folder.", hint="give the folder that holds config.json")
    if text.startswith((".", "/", "~")):
        raise PathNotFound.for_path(text, "model folder")
    recipe = catalog.recipe(text)
    if recipe is not None:
        return ModelChoice(recipe.hf_id, recipe.hf_id, recipe.name, recipe)
    if text.count("/") == 1:
        name = text.rpartition("/")[2]
        return ModelChoice(text, text, check_part(name, "model name"), None)
    close = catalog.close_matches(text)
    raise PathNotFound(
        f"no model is called {text!r}.",
        hint=f"did you mean {close[0]}?"
        if close
        else "give a folder, an id such as Qwen/Qwen3-8B, or a name of the zoo",
    )


def check_made_for(folder: Path, manifest: Manifest | None) -> None:
    """Refuse the artifact of a folder's name when it was computed for another model of that name.

    Names that the zoo knows mean one model everywhere; a folder may have any name.

    Raises:
        UsageError: the configurations differ.
    """
    made_for = manifest.model.config_sha256 if manifest else None
    if made_for is None or choose_model(str(folder)).recipe is not None:
        return
    if made_for != sha256_hex((folder / "config.json").read_bytes()):
        raise UsageError(
            f"{manifest.id if manifest else 'it'} was made for another model than {folder}: config.json differs.",
            hint="give the folder a name of its own",
        )


def check_model_id(text: str) -> None:
    """Refuse what cannot be the id of a model, `ORG/NAME` or `NAME`; raises `InvalidName`."""
    parts = text.split("/")
    if len(parts) > 2:
        raise InvalidName(f"{text[:120]!r} is not a model id.", hint="ids look like Qwen/Qwen3-8B")
    for part in parts:
        check_part(part, "model id")


def serving_recipe(choice: ModelChoice, geometry: Geometry) -> ServingRecipe:
    """The recipe to calibrate and serve with: the zoo's for this model when its geometry fits, else the default."""
    if choice.recipe is not None and choice.recipe.geometry == geometry:
        return choice.recipe.serving
    group = 128 if geometry.head_dim % 128 == 0 and geometry.v_head_dim % 128 == 0 else geometry.head_dim
    return ServingRecipe(group_size=group, clip=Clip(k=0.96, v=0.92))


def _safe(name: str) -> str:
    try:
        return check_part(name, "model name")
    except InvalidName:
        kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).strip(".-_")
        return check_part(kept or "model", "model name")
