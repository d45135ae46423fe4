"""The model that an artifact runs with and the recipe for both: known to go together before
anything starts. No hub is asked, and neither weights nor sglang are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.names import typed
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.engines.sglang import refusals, sizing
from oscar_zoo.engines.sglang.launch import preflight
from oscar_zoo.engines.sglang.launch.preflight import ServerDemand
from oscar_zoo.engines.sglang.sizing import ITEMSIZES, SizeFlags
from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.models import weight_files
from oscar_zoo.models.config_file import ConfigFile, check_cache, geometry_of_folder
from oscar_zoo.models.geometry import quantization
from oscar_zoo.observer import Observer
from oscar_zoo.registry.architectures import architecture
from oscar_zoo.registry.artifacts import Artifact
from oscar_zoo.registry.recipe import serving_recipe
from oscar_zoo.registry.targets import ModelChoice, parse_model


@dataclass
class ArtifactModel:
    """The model that an artifact runs with; the two are known to fit. The recipe is that of the
    artifact, else of the zoo or the default for the model; a model in a folder has a `config`."""

    choice: ModelChoice
    geometry: Geometry | None
    recipe: ServingRecipe
    config: ConfigFile | None = None

    @classmethod
    def of(cls, artifact: Artifact, choice: ModelChoice) -> ArtifactModel:
        """Look at the model `choice` and hold `artifact` against it; no weights are read."""
        folder, config = Path(choice.source), None
        geometry = choice.recipe.geometry if choice.recipe else None
        if folder.is_dir():
            config = preflight.check_folder(folder, choice.model_id)
            geometry = geometry_of_folder(folder, choice.model_id, config)
        else:
            check_served(choice)
        return replace(ArtifactModel.with_geometry(artifact, choice, geometry), config=config)

    @staticmethod
    def with_geometry(
        artifact: Artifact, choice: ModelChoice, geometry: Geometry | None
    ) -> ArtifactModel:
        """The same for a model whose `geometry` was read already."""
        k, v = artifact.verified.k, artifact.verified.v
        if geometry is not None and k is not None and v is not None:
            k.require_geometry("k", geometry, choice.name)
            v.require_geometry("v", geometry, choice.name)
        if artifact.recipe is not None:
            return ArtifactModel(choice, geometry, artifact.recipe)
        if geometry is None:
            raise UsageError(
                "neither the artifact nor the zoo has a serving recipe.",
                hint="serve an artifact with an oscar.json",
            )
        return ArtifactModel(choice, geometry, serving_recipe(choice.recipe, geometry))

    def demand(self, device: str, gpu: int, tensor_parallel: int, flags: SizeFlags) -> ServerDemand:
        """Weights that are not in a folder are those of the zoo in 16 bits, or not known."""
        assert self.geometry is not None, "the callers look at it"
        parameters = self.choice.recipe.parameters if self.choice.recipe else None
        weights, kind = (None, None) if parameters is None else (2 * parameters, "bfloat16")
        if self.config is not None:
            weights, kind = weight_files.stored_weights(Path(self.choice.source), self.config)
        gpus = sizing.Layout.of_flags(flags, tp=tensor_parallel).gpus
        return ServerDemand(
            model=self.choice.name,
            geometry=self.geometry,
            windows=self.recipe.windows,
            weights=weights,
            itemsize=None if kind is None else ITEMSIZES.get(kind, 2),
            device=device,
            gpu=gpu,
            tensor_parallel=tensor_parallel,
            flags=flags,
            memory=sizing.gpu_memory(gpu, gpus) if device == "cuda" else None,
        )


def model_for(
    artifact: Artifact, model: ModelChoice | None, observer: Observer, *, again: str
) -> ModelChoice:
    known = model or artifact.asked_by
    if known is not None:
        return known
    made = artifact.base_model or "a model that it does not name"
    if "/" not in made:  # a folder, somewhere
        raise UsageError(f"this artifact is for {made}.", hint="say where that is: --model FOLDER")
    choice = parse_model(made, observer)
    choice.check_can_be_had(again)
    return choice


def check_served(
    choice: ModelChoice | None,
    revision: str | None = None,
    device: str | None = None,
    *,
    printed: bool = False,
) -> None:
    """Refuse a model that no server takes, or none on `device` where that is known, before an
    artifact or weights are wanted: by its `config.json` if that is on this machine, else by what
    the zoo knows about the architecture of its name. A command that is `printed` may name a GPU."""
    if choice is None:
        return
    config = ConfigFile.kept(choice.source, revision)
    if config is not None:
        refusals.check_config(config, choice.model_id)
    kind = choice.recipe.model_type if choice.recipe else getattr(config, "model_type", None)
    known = architecture(str(kind))
    if known is None:
        return
    why, where = known.serve_gpu.reason if config is None else None, ""
    if why is None and device == "cpu":
        alone = config and (quantization(config) or {}).get("quant_method") in ("awq", "gptq")
        why = "SGLang reads such weights on GPUs alone" if alone else known.serve_cpu.reason
        where = " on a CPU"
    if why is not None:
        hint = f"what works with it: oscar-zoo info {model_argument(choice.source)}"
        if printed and where:
            hint = "for a machine with a GPU: add --device cuda"
        raise UnsupportedModel(
            f"oscar-zoo cannot serve {choice.name} ({kind}){where}: {why}.", hint=hint
        )


def check_used(choice: ModelChoice | None, revision: str | None = None) -> None:
    """Refuse a model that no command takes, neither `compute` nor `eval`; as `check_served`."""
    config = None if choice is None else ConfigFile.kept(choice.source, revision)
    if choice is not None and config is not None:
        check_cache(config, choice.model_id)


def both_sides(artifact: Artifact) -> tuple[RotationSet, RotationSet]:
    """The rotations of keys and values; raises `UsageError` when one of the two is missing."""
    k, v = artifact.verified.k, artifact.verified.v
    if k is None or v is None:
        said = f"{artifact.label} has only one side; a cache needs K and V."
        raise UsageError(said, hint="give the folder that holds both")
    return k, v


def model_argument(model: str) -> str:
    """A model for another command line: a folder as a path, else its name."""
    path = Path(model).expanduser()
    return quote(typed(path) if path.is_dir() else model)
