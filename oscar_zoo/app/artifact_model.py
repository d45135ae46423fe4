"""The model that an artifact runs with, and the serving recipe of the two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.app.refused_models import check_served
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.errors import UsageError
from oscar_zoo.observer import Observer
from oscar_zoo.registry.recipe import serving_recipe
from oscar_zoo.registry.targets import ModelChoice, parse_model

if TYPE_CHECKING:
    from oscar_zoo.models.config_file import ConfigFile


@dataclass(frozen=True)
class ArtifactModel:
    """The model that an artifact runs with; the two are known to fit.

    Attributes:
        choice: the model.
        geometry: of the model, where it is known.
        recipe: the serving recipe in force: the artifact's, else the zoo's or the default for the
            model.
        config: the `config.json` of a model in a folder, read when the model was looked at.
    """

    choice: ModelChoice
    geometry: Geometry | None
    recipe: ServingRecipe
    config: ConfigFile | None = None

    @classmethod
    def of(cls, artifact: Artifact, choice: ModelChoice) -> ArtifactModel:
        """Look at the model `choice` and hold `artifact` against it; no weights are read."""
        folder = Path(choice.source)
        if not folder.is_dir():
            check_served(choice)
            known = choice.recipe.geometry if choice.recipe else None
            return cls.with_geometry(artifact, choice, known)
        from oscar_zoo.engines.sglang.launch import preflight
        from oscar_zoo.models.folder_geometry import geometry_of_folder

        config = preflight.check_folder(folder, choice.model_id)
        geometry = geometry_of_folder(folder, choice.model_id, config)
        return replace(cls.with_geometry(artifact, choice, geometry), config=config)

    @classmethod
    def with_geometry(
        cls, artifact: Artifact, choice: ModelChoice, geometry: Geometry | None
    ) -> ArtifactModel:
        """The same for a model whose `geometry` was read already."""
        k, v = artifact.verified.k, artifact.verified.v
        if geometry is not None and k is not None and v is not None:
            k.require_geometry("k", geometry, choice.name)
            v.require_geometry("v", geometry, choice.name)
        if artifact.recipe is not None:
            return cls(choice, geometry, artifact.recipe)
        if geometry is None:
            raise UsageError(
                "neither the artifact nor the zoo has a serving recipe.",
                hint="serve an artifact with an oscar.json",
            )
        return cls(choice, geometry, serving_recipe(choice.recipe, geometry))


def model_for(
    artifact: Artifact, model: ModelChoice | None, observer: Observer, *, again: str
) -> ModelChoice:
    """The model to run with `artifact`: `model` if it is given, else the artifact's base model."""
    known = model or artifact.asked_by
    if known is not None:
        return known
    if artifact.base_model is None:
        raise UsageError(
            "this artifact does not say which model it is for.", hint="add --model MODEL"
        )
    choice = parse_model(artifact.base_model, observer)
    choice.check_can_be_had(again)
    return choice


def both_sides(artifact: Artifact) -> tuple[RotationSet, RotationSet]:
    """The rotations of keys and values; raises `UsageError` when one of the two is missing."""
    k, v = artifact.verified.k, artifact.verified.v
    if k is None or v is None:
        raise UsageError(
            f"{artifact.label} has only one side; a cache needs K and V.",
            hint="give the folder that holds both",
        )
    return k, v


def model_argument(model: str) -> str:
    """A model for another command line: a folder as a path, else its name."""
    path = Path(model).expanduser()
    if not path.is_dir():
        return quote(model)
    text = path_text(path)
    return quote(text if text.startswith(("/", "./", "../")) else f"./{text}")
