"""What a benchmark measures: a model and an artifact, real ones or ones that are made up here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.app.artifacts import Artifact, open_artifact
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.bench import dummy
from oscar_zoo.errors import UsageError
from oscar_zoo.models import config_file
from oscar_zoo.models.folder_geometry import geometry_of_folder
from oscar_zoo.observer import Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.prepared import ArtifactModel, model_for


@dataclass(frozen=True)
class SubjectNames:
    """What the user named, before anything is looked up.

    Attributes:
        artifact: name or folder of the artifact; `None` makes one of Hadamard matrices.
        dummy_weights: model whose shape is measured with random weights, or `None`.
        model: model to measure the artifact with, or `None` for its base model.
        again: the command line that takes the FOLDER of a model, for errors.
    """

    artifact: str | Path | None
    dummy_weights: str | Path | None
    model: str | None
    again: str

    def check(self) -> None:
        """Refuse names that mean nothing to measure, or too much; raises `UsageError`."""
        if self.artifact is None and self.dummy_weights is None:
            raise UsageError(
                "nothing to measure was named.",
                hint="give an artifact, or --dummy-weights Qwen3-8B",
            )
        if self.model is not None and self.dummy_weights is not None:
            raise UsageError(
                "--model and --dummy-weights exclude each other.", hint="give one of them"
            )


@dataclass(frozen=True)
class Subject:
    """A model and an artifact that fit together.

    Attributes:
        model: the model, its geometry and the recipe.
        source: what the engine loads: a local folder or a hub id.
        artifact: the artifact of the INT2 cache.
        random_weights: whether the weights are random.
        label: how a report calls the artifact.
    """

    model: ArtifactModel
    source: str
    artifact: Artifact
    random_weights: bool
    label: str


def find_subject(
    names: SubjectNames, sources: Sources, private: Path, observer: Observer, *, longest: int
) -> Subject:
    """Look up what `names` mean; what nobody named is made in the folder `private`.

    Args:
        longest: tokens of the longest request, prompt and answer.
    """
    names.check()
    if names.dummy_weights is not None:
        return _made(names.dummy_weights, names.artifact, sources, private, observer, longest)
    model = targets.parse_given_model(names.model, observer, again=names.again)
    artifact = open_artifact(targets.parse(names.artifact or ""), sources, observer)
    choice = model_for(artifact, model, observer, again=names.again)
    _check_length(choice, longest)
    fitting = ArtifactModel.of(artifact, choice)
    return Subject(fitting, choice.source, artifact, False, artifact.label)


def _made(
    dummy_weights: str | Path,
    named: str | Path | None,
    sources: Sources,
    private: Path,
    observer: Observer,
    longest: int,
) -> Subject:
    """A model with random weights, with the artifact that was `named` or with Hadamard matrices."""
    choice = targets.parse_model(dummy_weights, observer)
    folder = private / choice.name
    geometry = _write_model(choice, folder, longest)
    if named is None:
        dummy.write_rotations(private / "hadamard", geometry)
    artifact = open_artifact(targets.parse(named or private / "hadamard"), sources, observer)
    label = "Hadamard" if named is None else artifact.label
    fitting = ArtifactModel.with_geometry(artifact, choice, geometry)
    return Subject(fitting, str(folder), artifact, True, label)


def _check_length(choice: ModelChoice, longest: int) -> None:
    if not Path(choice.source).is_dir():
        return
    room = dummy.longest_context(config_file.read_config(Path(choice.source)))
    if room is not None and longest > room:
        raise UsageError(
            f"{choice.name} reads up to {room:,} tokens, {longest:,} are wanted.",
            hint="prompt and answer count together; ask for shorter ones (--context, --new-tokens)",
        )


def _write_model(choice: ModelChoice, folder: Path, longest: int) -> Geometry:
    """Write the configuration of a model without weights; the geometry of its cache."""
    source = Path(choice.source)
    if source.is_dir():
        config = config_file.read_config(source)
    elif choice.recipe is not None:
        config = dummy.config_of_recipe(choice.recipe)
    else:
        raise UsageError(
            f"the shapes of {choice.source} are not known here.",
            hint="give a folder that holds its config.json",
        )
    dummy.write_model(folder, config, longest=longest)
    if source.is_dir():
        dummy.copy_what_prepares_input(source, folder)
    return geometry_of_folder(folder, choice.model_id)
