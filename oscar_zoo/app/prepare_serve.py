"""Model, recipe, devices and memory of a server to be, known to fit before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.app.artifact_model import ArtifactModel, model_for
from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.app.refused_models import check_served
from oscar_zoo.artifact import specs
from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe
from oscar_zoo.engines.sglang import concurrency
from oscar_zoo.engines.sglang.flags import ITEMSIZES, SizeFlags
from oscar_zoo.engines.sglang.head_split import check_heads
from oscar_zoo.engines.sglang.launch import preflight
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.setting_flags import OPTIONS
from oscar_zoo.models import hardware, weight_files
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.observer import Observer
from oscar_zoo.registry.targets import ModelChoice


@dataclass(frozen=True)
class Prepared:
    """What is to be served.

    Attributes:
        artifact: verified.
        choice: the model.
        geometry: of the model, where it is known.
        config: the `config.json` of a model in a folder.
        recipe: in force.
        device: `cpu` or `cuda`.
        gpu: number of the first GPU.
        tensor_parallel: ranks that share the model, each on a GPU or a part of the CPU.
    """

    artifact: Artifact
    choice: ModelChoice
    geometry: Geometry | None
    config: ConfigFile | None
    recipe: ServingRecipe
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


def check_asked_gpus(choice: ModelChoice | None, device: str, flags: SizeFlags) -> None:
    """Refuse a number of GPUs that cannot share the heads of a model whose shape the zoo knows,
    before an artifact is fetched or computed. `prepare` does it for every model.

    Args:
        choice: the model; `None` is never refused.
    """
    known = None if choice is None or Path(choice.source).is_dir() else choice.recipe
    if choice is not None and known is not None and flags.tensor_parallel is not None:
        _check_heads(choice.name, known.geometry, device, flags, flags.tensor_parallel)


def prepare(
    artifact: Artifact,
    observer: Observer,
    *,
    again: str,
    model: ModelChoice | None,
    clip: Clip | None,
    device: str,
    gpu: int,
    flags: SizeFlags,
    usual_gpus: bool = False,
) -> Prepared:
    """Choose model, recipe and number of GPUs, and refuse what does not go together.

    Args:
        model: model to serve, or `None` for the artifact's base model.
    """
    choice = model_for(artifact, model, observer, again=again)
    check_served(choice, None, device)
    fitting = ArtifactModel.of(artifact, choice)
    recipe = fitting.recipe.override(clip=clip)
    parallel = flags.tensor_parallel
    if parallel is None:
        parallel = _usual_gpus(choice, gpu, all_here=usual_gpus) if device == "cuda" else 1
    _check_heads(choice.name, fitting.geometry, device, flags, parallel)
    return Prepared(
        artifact, choice, fitting.geometry, fitting.config, recipe, device, gpu, parallel
    )


def check_groups(prepared: Prepared, flags: UserFlags) -> None:
    """Refuse groups that rows of the cache cannot be cut into, of the recipe or of the user's
    flags, before a server finds out; raises `UsageError`."""
    if prepared.geometry is None:
        return
    option = OPTIONS["group_size"]
    given = flags.text(*option.names)
    size = prepared.recipe.group_size if given is None else option.parse(given, option.flag)
    specs.check_groups(
        prepared.geometry.head_dims, size, prepared.choice.name, option=f"-- {option.flag}={{}}"
    )


def check_memory(prepared: Prepared, flags: SizeFlags) -> None:
    """Refuse a server that cannot fit on its devices, which are of this machine."""
    if prepared.geometry is None:
        return
    choice, gpu, parallel = prepared.choice, prepared.gpu, prepared.tensor_parallel
    config, on_gpu = prepared.config, prepared.device == "cuda"
    weights, kind = stored_weights_of(choice, config)
    gpus = concurrency.Layout.of_flags(flags, tp=parallel).gpus
    demand = preflight.ServerDemand(
        model=choice.name,
        geometry=prepared.geometry,
        windows=prepared.recipe.windows,
        weights=weights,
        itemsize=None if kind is None else ITEMSIZES.get(kind, 2),
        device=prepared.device,
        gpu=gpu,
        tensor_parallel=parallel,
        flags=flags,
        memory=concurrency.gpu_memory(gpu, gpus) if on_gpu else None,
    )
    preflight.check_memory(demand, preflight.free_memory(prepared.device, gpu, parallel))


def stored_weights_of(
    choice: ModelChoice, config: ConfigFile | None
) -> tuple[int | None, str | None]:
    """Bytes of the weights of a model as they are stored, and the type of their numbers.

    Args:
        config: the `config.json` of a model in a folder. Without it, weights are those of the zoo
            in 16 bits; weights on a hub are not looked at.

    Returns:
        The bytes, `None` where nobody knows them, and a type, `None` when they are quantized.
    """
    if config is not None:
        return weight_files.stored_weights(Path(choice.source), config)
    parameters = choice.recipe.parameters if choice.recipe else None
    return (None, None) if parameters is None else (2 * parameters, "bfloat16")


def _check_heads(
    name: str, geometry: Geometry | None, device: str, flags: SizeFlags, parallel: int
) -> None:
    if device == "cuda" and geometry is not None:
        layout = concurrency.Layout.of_flags(flags, tp=parallel)
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
