"""What `fit-gpu` is asked about: a model, and the artifact whose bits an INT2 cache of it would
have. No hub is asked over the network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from oscar_zoo.app.model_needs import (
    Needs,
    longest_of_manifest,
    needs_of_choice,
    needs_of_manifest,
    needs_of_recipe,
)
from oscar_zoo.app.refused_models import check_served, check_used
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import Reference, is_path
from oscar_zoo.errors import ArtifactNotFound, UnsupportedModel, UsageError
from oscar_zoo.next_step import Pull
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import known_entries, served_entry
from oscar_zoo.registry.targets import (
    ModelChoice,
    NameTarget,
    PathTarget,
    choose_model,
    parse,
    recorded_model,
    suggest_path,
)


@dataclass(frozen=True)
class Subject:
    """A model with a serving recipe.

    Attributes:
        name: of the model.
        needs: what it takes on GPUs; `serving` is the recipe of the artifact, where there is one.
        artifact: `<Model>:<tag>` of the artifact, or `None` where no artifact is known here.
        not_served: why `serve` refuses the model, or `None` where that is not known.
    """

    name: str
    needs: Needs
    artifact: str | None
    not_served: str | None = None


def subject_of(text: str) -> Subject:
    """The model and the artifact that `text` means: a model's name or folder, `NAME:TAG`, or an
    artifact's folder.

    Without a tag it is the artifact that `serve` would take for this model, as far as this machine
    knows; where several have its name and none is the default, it is none.
    """
    target = _artifact_target(text)
    if target is not None:
        return _of_artifact(_entry(target))
    choice = choose_model(text)
    needs = _needs(choice)
    if needs is None and not is_path(text) and Path(text).exists():
        error = ArtifactNotFound.for_name(text)
        suggest_path(Path(text), error)
        raise error
    if needs is None:
        raise UsageError(
            f"the shapes of {choice.name} are not known here.",
            hint="give the folder that holds its config.json",
        )
    entry = served_entry(Reference(choice.name))
    manifest = entry.manifest if entry is not None else None
    if manifest is None or manifest.model.geometry != needs.geometry:
        return Subject(choice.name, needs, None, _not_served(choice))
    artifact = manifest.artifact_id.reference
    return Subject(choice.name, _served(needs, manifest), artifact, _not_served(choice))


def _artifact_target(text: str) -> PathTarget | NameTarget | None:
    """The artifact that `text` is written as; `None` for what names a model."""
    if not is_path(text) and not set(":@") & set(text):
        return None
    target = parse(text)
    if isinstance(target, PathTarget):
        return target if (target.path / FILE_NAME).is_file() else None
    return target if isinstance(target, NameTarget) else None


def _entry(target: PathTarget | NameTarget) -> Entry:
    try:
        (entry,), _ = known_entries([target], Sources(offline=True))
    except ArtifactNotFound as error:
        raise ArtifactNotFound(
            f"{target} is not on this machine, and fit-gpu asks no hub.",
            hint=error.advice,
            suggestions=error.suggestions,
            next_step=Pull(str(target)),
        ) from None
    return entry


def _of_artifact(entry: Entry) -> Subject:
    name, manifest = entry.id.reference, entry.manifest
    if manifest is None:
        if entry.recipe is None:
            raise UsageError(
                f"{name} has no oscar.json, and the zoo does not know the shapes of its model.",
                hint="give the folder of the model",
            )
        return Subject(entry.recipe.name, needs_of_recipe(entry.recipe), name)
    choice = recorded_model(manifest.model.id)
    needs = _needs(choice)
    if needs is None or needs.geometry != manifest.model.geometry:
        needs = needs_of_manifest(manifest)
    return Subject(choice.name, _served(needs, manifest), name, _not_served(choice))


def _served(needs: Needs, manifest: Manifest) -> Needs:
    """The needs of a model with the artifact of `manifest`."""
    longest = needs.longest or longest_of_manifest(manifest)
    return replace(needs, serving=manifest.recipe, longest=longest)


def _not_served(choice: ModelChoice) -> str | None:
    """Why `serve` refuses a model, as a sentence; `None` when it does not."""
    try:
        check_served(choice)
    except UnsupportedModel as error:
        return error.message
    return None


def _needs(choice: ModelChoice) -> Needs | None:
    check_used(choice)
    return needs_of_choice(choice)
