"""The model that an artifact runs with, their recipe, and the devices and memory of a server for
the two: known to go together and to fit before anything starts. No hub is asked, and neither
weights nor sglang are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from oscar_zoo.artifact import specs
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.engines.sglang import refusals, sizing
from oscar_zoo.engines.sglang.launch import preflight
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.setting_flags import OPTIONS
from oscar_zoo.engines.sglang.sizing import ITEMSIZES, SizeFlags, check_heads
from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.models import hardware, weight_files
from oscar_zoo.models.config_file import ConfigFile, check_cache
from oscar_zoo.observer import Observer
from oscar_zoo.registry.architectures import architecture
from oscar_zoo.registry.artifacts import Artifact
from oscar_zoo.registry.recipe import serving_recipe
from oscar_zoo.registry.targets import ModelChoice, parse_model
from oscar_zoo.serving.params import ServeParams


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
            return ArtifactModel.with_geometry(artifact, choice, known)
        from oscar_zoo.models.config_file import geometry_of_folder

        config = preflight.check_folder(folder, choice.model_id)
        geometry = geometry_of_folder(folder, choice.model_id, config)
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


@dataclass(frozen=True, kw_only=True)
class Prepared(ArtifactModel):
    """What is to be served, on `device`, `cpu` or `cuda`, from its GPU number `gpu` on;
    `tensor_parallel` ranks share the model, each on a GPU or a part of the CPU."""

    artifact: Artifact
    device: str
    gpu: int
    tensor_parallel: int

    @property
    def model(self) -> str:
        """The model as a server started anywhere finds it: an absolute path, or its hub id."""
        folder = Path(self.choice.source)
        return str(folder.absolute()) if folder.is_dir() else self.choice.source

    @property
    def name(self) -> str:
        """How the server calls the artifact to those who ask."""
        return _printable(f"{self.artifact.label}@{self.artifact.verified.digest}")

    @property
    def served_name(self) -> str:
        """What requests call the model."""
        return _printable(self.choice.model_id)


def prepare(
    params: ServeParams,
    model: ModelChoice | None,
    artifact: Artifact,
    device: str,
    gpu: int,
    observer: Observer,
) -> Prepared:
    """Choose model (`None` is the artifact's base model), recipe and number of GPUs, and refuse
    what does not go together or does not fit. Memory and number of GPUs are not those of this
    machine where the command is only printed."""
    flags = UserFlags(params.flags)
    size = flags.sizes()
    with hardware.one_look():
        choice = model_for(artifact, model, observer, again=params.command_line(model="FOLDER"))
        check_served(choice, None, device)
        fitting = ArtifactModel.of(artifact, choice)
        parallel = size.tensor_parallel
        if parallel is None:
            elsewhere = params.print_only and params.device is not None
            parallel = _usual_gpus(choice, gpu, all_here=elsewhere) if device == "cuda" else 1
        _check_heads(choice.name, fitting.geometry, device, size, parallel)
        prepared = Prepared(
            choice,
            fitting.geometry,
            fitting.recipe.override(clip=params.clip),
            fitting.config,
            artifact=artifact,
            device=device,
            gpu=gpu,
            tensor_parallel=parallel,
        )
        _check_groups(prepared, flags)
        if not params.print_only:
            _check_memory(prepared, size)
    return prepared


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


def check_served(
    choice: ModelChoice | None, revision: str | None = None, device: str | None = None
) -> None:
    """Refuse a model that no server takes, or none on `device` where that is known, before an
    artifact or weights are wanted: by its `config.json` if that is on this machine, else by what
    the zoo knows about the architecture of its name."""
    if choice is None:
        return
    config = ConfigFile.kept(choice.source, revision)
    if config is not None:
        refusals.check_config(config, choice.model_id)
    kind = choice.recipe.model_type if choice.recipe else getattr(config, "model_type", None)
    known = architecture(str(kind))
    if known is None:
        return
    why = known.serve_gpu.reason if config is None else None
    if why is None and device == "cpu":
        why = known.serve_cpu.reason
    if why is not None:
        where = " on a CPU" if device == "cpu" else ""
        raise UnsupportedModel(
            f"oscar-zoo cannot serve {choice.name} ({kind}){where}: {why}.",
            hint=f"what works with it: oscar-zoo info {choice.name}",
        )


def check_used(choice: ModelChoice | None, revision: str | None = None) -> None:
    """Refuse a model that no command takes, neither `compute` nor `eval`; as `check_served`."""
    config = None if choice is None else ConfigFile.kept(choice.source, revision)
    if choice is not None and config is not None:
        check_cache(config, choice.model_id)


def check_asked_gpus(choice: ModelChoice | None, device: str, flags: SizeFlags) -> None:
    """Refuse a number of GPUs that cannot share the heads of a model whose shape the zoo knows,
    before an artifact is fetched or computed. `prepare` does it for every model."""
    known = None if choice is None or Path(choice.source).is_dir() else choice.recipe
    if choice is not None and known is not None and flags.tensor_parallel is not None:
        _check_heads(choice.name, known.geometry, device, flags, flags.tensor_parallel)


def _check_groups(prepared: Prepared, flags: UserFlags) -> None:
    """Refuse groups that rows of the cache cannot be cut into, of the recipe or of the user's
    flags, before a server finds out."""
    if prepared.geometry is None:
        return
    option = OPTIONS["group_size"]
    given = flags.text(*option.names)
    size = prepared.recipe.group_size if given is None else option.parse(given, option.flag)
    specs.check_groups(
        prepared.geometry.head_dims, size, prepared.choice.name, option=f"-- {option.flag}={{}}"
    )


def _check_memory(prepared: Prepared, flags: SizeFlags) -> None:
    """Refuse a server that cannot fit on its devices, which are of this machine."""
    if prepared.geometry is None:
        return
    device, gpu, parallel = prepared.device, prepared.gpu, prepared.tensor_parallel
    weights, kind = stored_weights_of(prepared.choice, prepared.config)
    gpus = sizing.Layout.of_flags(flags, tp=parallel).gpus
    demand = preflight.ServerDemand(
        model=prepared.choice.name,
        geometry=prepared.geometry,
        windows=prepared.recipe.windows,
        weights=weights,
        itemsize=None if kind is None else ITEMSIZES.get(kind, 2),
        device=device,
        gpu=gpu,
        tensor_parallel=parallel,
        flags=flags,
        memory=sizing.gpu_memory(gpu, gpus) if device == "cuda" else None,
    )
    preflight.check_memory(demand, preflight.free_memory(device, gpu, parallel))


def stored_weights_of(
    choice: ModelChoice, config: ConfigFile | None
) -> tuple[int | None, str | None]:
    """Bytes of the weights of a model as they are stored, `None` where nobody knows them, and the
    type of their numbers, `None` when they are quantized.

    Without the `config.json` of a folder, weights are those of the zoo in 16 bits; weights on a hub
    are not looked at.
    """
    if config is not None:
        return weight_files.stored_weights(Path(choice.source), config)
    parameters = choice.recipe.parameters if choice.recipe else None
    return (None, None) if parameters is None else (2 * parameters, "bfloat16")


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


def _check_heads(
    name: str, geometry: Geometry | None, device: str, flags: SizeFlags, parallel: int
) -> None:
    if device == "cuda" and geometry is not None:
        layout = sizing.Layout.of_flags(flags, tp=parallel)
        check_heads(name, geometry, layout, option="-- --tp={}")


def _usual_gpus(choice: ModelChoice, gpu: int, *, all_here: bool) -> int:
    """The number of GPUs that the zoo starts this model on; unless `all_here`, halved until this
    machine has as many."""
    usual = choice.recipe.tensor_parallel if choice.recipe else 1
    seen = usual if all_here else len(hardware.visible(hardware.gpus())) - gpu
    while usual > max(1, seen):
        usual //= 2
    return usual


def _printable(text: str) -> str:
    """`text` without characters that could break a line of a log or of an answer."""
    return "".join(character for character in text if character.isprintable())
