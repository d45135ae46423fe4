"""What `serve` and `bench serve` run: artifact, model, recipe and device, refused in one line before they start."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.cli import render
from oscar_zoo.cli.artifacts import OpenArtifact, open_artifact, open_reference
from oscar_zoo.cli.loading import pick_serving_device, with_overrides
from oscar_zoo.cli.models import ModelChoice, choose_model, serving_recipe
from oscar_zoo.cli.offering import Wish, agreed, can_ask, command_line, model_to_compute, plan_computing, refusal
from oscar_zoo.cli.targets import model_folder
from oscar_zoo.errors import ArtifactNotFound, OscarZooError, UsageError
from oscar_zoo.evaluate import config_file, graphics
from oscar_zoo.hubs import config
from oscar_zoo.sglang_plugin import concurrency, launch, preflight, staging
from oscar_zoo.sglang_plugin.settings import Source


@dataclass(frozen=True)
class ServeRequest:
    """The command line of `serve`, parsed; see its help for the meaning of each."""

    artifact: str
    extra: tuple[str, ...]
    model: str | None
    revision: str | None
    port: int
    expose: str | None
    api_key_file: Path | None
    clip: str | None
    timeout: float
    hubs: tuple[str, ...]
    device: str | None
    quiet: bool
    as_json: bool
    compute: bool
    calib_data: str | None
    print_only: bool = False
    engine: str = "sglang"

    @property
    def silent(self) -> bool:
        """Whether to show neither progress nor notes."""
        return self.quiet or self.as_json

    @property
    def wish(self) -> Wish:
        """What to do where nobody has the artifact."""
        offline = config.load(self.hubs).offline
        return Wish(self.compute, self.calib_data, self.device, self.revision, offline=offline, silent=self.silent)


@dataclass(frozen=True)
class Chosen:
    """What is to be served, known to fit together before anything starts.

    Attributes:
        artifact: verified.
        choice: the model.
        recipe: in force.
        device, gpu: kind, and number of the first GPU.
        tensor_parallel: number of GPUs.
    """

    artifact: OpenArtifact
    choice: ModelChoice
    recipe: ServingRecipe
    device: str
    gpu: int
    tensor_parallel: int

    @property
    def model(self) -> str:
        """The model as a server started anywhere finds it: an absolute path, or its id on a hub."""
        folder = Path(self.choice.source)
        return str(folder.absolute()) if folder.is_dir() else self.choice.source

    def options(self, request: ServeRequest, source: Source, digest: str, *, key: Path | None) -> launch.ServeOptions:
        """The server's options, with the rotations of `source`."""
        return launch.ServeOptions(
            model=self.model,
            revision=request.revision,
            rotations=source,
            rotations_sha256=digest,
            recipe=self.recipe,
            kernels=staging.kernels_folder(),
            device=self.device,
            gpu=self.gpu,
            tensor_parallel=self.tensor_parallel,
            host=request.expose or launch.LOOPBACK,
            port=request.port,
            config_file=key,
            name=f"{render.clean(self.artifact.label)}@{self.artifact.verified.digest}",
            extra=request.extra,
        )


def choose(request: ServeRequest, *, here: bool = True) -> Chosen:
    """Artifact, model, recipe and device, refused in one line where they do not go together.

    Args:
        here: whether the server runs on this machine, so that its devices and memory count.

    Raises:
        OscarZooError: anything wrong with them; nothing was started and no weights were read.
    """
    device, gpu = pick_serving_device(request.device, check=here)
    artifact = _open(request)
    choice = model_for(artifact, request.model)
    geometry = model_geometry(choice)
    recipe = with_overrides(recipe_for_model(artifact, choice, geometry), clip=request.clip)
    wanted = preflight.tensor_parallel(request.extra)
    parallel = wanted or (_usual_parallel(choice, gpu, here=here or request.device is None) if device == "cuda" else 1)
    if here and geometry is not None:
        folder = Path(choice.source)
        weights, itemsize = preflight.stored_weights(folder) if folder.is_dir() else _known_weights(choice)
        layout = concurrency.Layout.of_flags(request.extra, tp=parallel)
        memory = concurrency.gpu_memory(gpu, layout.gpus) if device == "cuda" else None
        demand = preflight.Server(
            choice.name, geometry, recipe.windows, weights, itemsize, device, gpu, parallel, request.extra, memory
        )
        preflight.check_memory(demand, preflight.free_memory(device, gpu, parallel))
    return Chosen(artifact, choice, recipe, device, gpu, parallel)


def _usual_parallel(choice: ModelChoice, gpu: int, *, here: bool) -> int:
    """GPUs that the zoo starts this model on; here no more than there are, in powers of two."""
    usual = choice.recipe.tensor_parallel if choice.recipe else 1
    seen = len(graphics.visible(graphics.gpus())) - gpu if here else usual
    while usual > max(1, seen):
        usual //= 2
    return usual


def _known_weights(choice: ModelChoice) -> tuple[int | None, int | None]:
    """Bytes of the weights of a model of the zoo, in 16 bits, and of one number; weights on a hub are not looked at."""
    parameters = choice.recipe.parameters if choice.recipe else None
    return (None, None) if parameters is None else (2 * parameters, 2)


def _open(request: ServeRequest) -> OpenArtifact:
    """The artifact; one that nobody has is computed, if that is wanted or somebody at a terminal agrees."""
    try:
        return open_artifact(request.artifact, hubs=request.hubs, quiet=request.silent)
    except OscarZooError as error:
        choice = model_to_compute(request.artifact, error, request.model)
        if choice is None:
            raise
        ask = isinstance(error, ArtifactNotFound) and can_ask() and not request.as_json
        plan = plan_computing(choice, request.wish, error) if request.compute or ask else None
        if plan is None or not (request.compute or agreed(plan)):
            raise refusal(error, command_line("serve", request.artifact)) from None
    from oscar_zoo.cli.computing import obtain
    from oscar_zoo.registry.pins import PinFile
    from oscar_zoo.registry.trust import Trust

    found = obtain(plan, Trust(lock=PinFile.of_project(), write_lock=False), silent=request.silent)
    record = found.pulled.artifact.record
    reference = Reference(record.id.model, record.id.tag, record.digest)
    return open_reference(reference, folder=model_folder(request.artifact), quiet=request.silent)


def model_for(artifact: OpenArtifact, model: str | None) -> ModelChoice:
    """The model to run with `artifact`: the one that was asked for, else its base model; raises `UsageError`."""
    if model is not None:
        return choose_model(model)
    if artifact.base_model is None:
        raise UsageError("this artifact does not say which model it is for.", hint="add --model MODEL")
    return choose_model(artifact.base_model)


def recipe_for_model(artifact: OpenArtifact, choice: ModelChoice, geometry: Geometry | None) -> ServingRecipe:
    """The recipe in force, once artifact and model are known to have one shape.

    Args:
        geometry: of the model, where it is known.

    Raises:
        GeometryMismatch: they have not.
        UsageError: nobody has a recipe.
    """
    if geometry is not None and artifact.verified.k is not None and artifact.verified.v is not None:
        artifact.verified.k.require_geometry("k", geometry, choice.name)
        artifact.verified.v.require_geometry("v", geometry, choice.name)
    if artifact.recipe is not None:
        return artifact.recipe
    if geometry is not None:
        return serving_recipe(choice, geometry)
    raise UsageError(
        "neither the artifact nor the zoo has a serving recipe.", hint="serve an artifact with an oscar.json"
    )


def model_geometry(choice: ModelChoice) -> Geometry | None:
    """Geometry of a model before it is loaded: of a folder, whose files are looked at, or as the zoo knows it.

    Raises:
        InvalidModel, StorageError: a folder that is no model.
        UnsupportedModel: one that an INT2 cache cannot serve.
    """
    folder = Path(choice.source)
    if not folder.is_dir():
        return choice.recipe.geometry if choice.recipe else None
    preflight.check_folder(folder)
    return geometry_of_folder(folder, choice.model_id)


def geometry_of_folder(folder: Path, model_id: str) -> Geometry:
    """As its `config.json` says; where that leaves something out, as the class of the model knows it."""
    if config_file.says_all(folder) or importlib.util.find_spec("transformers") is None:
        return config_file.describe_folder(folder, model_id).geometry
    from oscar_zoo.evaluate.models import inspect_model

    return inspect_model(str(folder), model_id=model_id).geometry
