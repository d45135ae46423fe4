"""The artifact and the model that are measured together in this process: found first, loaded when
nothing else can go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from oscar_zoo.app.artifacts import Artifact, open_artifact
from oscar_zoo.app.early_checks import check_device, check_model
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.serving.prepared import check_used, model_for

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Geometry, ServingRecipe
    from oscar_zoo.models.loading import Dtype, LoadedModel
    from oscar_zoo.registry.targets import ModelChoice


class Wanted(Protocol):
    """What the requests of `eval` and `ruler` have in common; see there."""

    @property
    def artifact(self) -> str | Path: ...
    @property
    def model(self) -> str | None: ...
    @property
    def data(self) -> str: ...
    @property
    def device(self) -> str | None: ...
    @property
    def dtype(self) -> Dtype: ...
    @property
    def stream_weights(self) -> bool | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def hubs(self) -> tuple[str, ...]: ...

    def command_line(self, model: str) -> str:
        """The command line that means this request with the model `model`."""
        ...


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        artifact: with its rotations.
        choice: the model that it is used with.
        text: to measure on.
    """

    artifact: Artifact
    choice: ModelChoice
    text: str


def find_subject(wanted: Wanted, observer: Observer, *, options: str = "") -> Subject:
    """Artifact, model and text, before any library that takes long is imported."""
    from oscar_zoo.evaluate.texts import read_text

    check_device(wanted.device)
    text = read_text(wanted.data, "validation")
    again = f"{wanted.command_line(model='FOLDER')} {options}".strip()
    named = targets.parse_given_model(wanted.model, observer, again=again)
    target = targets.parse(wanted.artifact)
    check_used(named or target.choice, wanted.revision)
    artifact = open_artifact(target, Sources(wanted.hubs), observer)
    choice = model_for(artifact, named, observer, again=again)
    check_model(choice.source, wanted.revision)
    return Subject(artifact, choice, text)


def recipe_of(subject: Subject, geometry: Geometry) -> ServingRecipe:
    """The serving recipe of the artifact, else the zoo's or the default for a model of this
    shape."""
    from oscar_zoo.registry.recipe import serving_recipe

    return subject.artifact.recipe or serving_recipe(subject.choice.recipe, geometry)


def load_subject(
    wanted: Wanted, subject: Subject, observer: Observer, *, longest: int
) -> LoadedModel:
    """The model in memory.

    Args:
        longest: tokens of the longest sequence.
    """
    from oscar_zoo.models.loading import load_model
    from oscar_zoo.models.memory import Workload, pick_device

    observer.advance("load", 0, 0)
    choice = subject.choice
    loaded = load_model(
        choice.source,
        revision=wanted.revision,
        dtype=wanted.dtype,
        device=pick_device(wanted.device, several=True),
        model_id=choice.model_id,
        stream=wanted.stream_weights,
        workload=Workload(longest),
    )
    for note in loaded.notes:
        observer.note(Note("model.loaded", note))
    return loaded
