"""What `serve` and `bench serve` run: artifact, model, recipe and device, refused in one line
before they start."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from oscar_zoo.app import targets
from oscar_zoo.app.artifacts import Artifact, open_artifact, open_reference
from oscar_zoo.app.compute_plan import (
    ComputeWish,
    compute_command,
    model_to_compute,
    plan_computing,
    refusal,
)
from oscar_zoo.app.devices import pick_serving_device
from oscar_zoo.app.sources import Sources
from oscar_zoo.artifact.names import Reference, path_text
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.artifact.tree import artifact_of_model
from oscar_zoo.artifact.verify import find_artifacts
from oscar_zoo.cli.loading import with_overrides
from oscar_zoo.cli.pasting import model_argument
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.progress import can_ask, current
from oscar_zoo.engines.sglang import concurrency, config_refusals, flags
from oscar_zoo.engines.sglang.launch import flag_refusals, plan, preflight, staging
from oscar_zoo.engines.sglang.settings import ArtifactSource
from oscar_zoo.errors import ArtifactNotFound, OscarZooError, UsageError
from oscar_zoo.hubs import config
from oscar_zoo.models import nvidia_smi
from oscar_zoo.models.folder_geometry import geometry_of_folder
from oscar_zoo.registry.model_names import ModelChoice, serving_recipe


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
    detach: bool = False
    offline: bool = False

    @property
    def silent(self) -> bool:
        """Whether to show neither progress nor notes."""
        return self.quiet or self.as_json

    @property
    def wish(self) -> ComputeWish:
        """What to do where nobody has the artifact."""
        offline = config.load(self.hubs, offline=self.offline).offline
        return ComputeWish(
            compute=self.compute,
            ask=not self.as_json and can_ask(),
            calib_data=self.calib_data,
            device=self.device,
            revision=self.revision,
            offline=offline,
            to_serve=True,
        )


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

    artifact: Artifact
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

    def options(
        self, request: ServeRequest, source: ArtifactSource, digest: str, *, key: Path | None
    ) -> plan.ServeOptions:
        """The server's options, with the rotations of `source`."""
        return plan.ServeOptions(
            model=self.model,
            revision=request.revision,
            rotations=source,
            rotations_sha256=digest,
            recipe=self.recipe,
            kernels=staging.kernels_folder(),
            device=self.device,
            gpu=self.gpu,
            tensor_parallel=self.tensor_parallel,
            host=request.expose or plan.LOOPBACK,
            port=request.port,
            config_file=key,
            name=f"{terminal.clean(self.artifact.label)}@{self.artifact.verified.digest}",
            served_name=terminal.printable(self.choice.model_id),
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
    stock = request.engine == "sglang"
    if stock:
        flag_refusals.check_flags(request.extra, device)
    artifact = _open(replace(request, artifact=artifact_in_tree(request.artifact, request.model)))
    choice = model_for(artifact, request.model, again=with_folder("serve", request.artifact))
    geometry = model_geometry(choice)
    if stock and geometry is not None:
        config_refusals.check_geometry(geometry)
    recipe = with_overrides(recipe_for_model(artifact, choice, geometry), clip=request.clip)
    wanted = flags.tensor_parallel(request.extra)
    parallel = wanted or (
        _usual_parallel(choice, gpu, here=here or request.device is None) if device == "cuda" else 1
    )
    if here and geometry is not None:
        folder = Path(choice.source)
        weights, itemsize = (
            preflight.stored_weights(folder) if folder.is_dir() else _known_weights(choice)
        )
        layout = concurrency.Layout.of_flags(request.extra, tp=parallel)
        memory = concurrency.gpu_memory(gpu, layout.gpus) if device == "cuda" else None
        demand = preflight.ServerDemand(
            choice.name,
            geometry,
            recipe.windows,
            weights,
            itemsize,
            device,
            gpu,
            parallel,
            request.extra,
            memory,
        )
        preflight.check_memory(demand, preflight.free_memory(device, gpu, parallel))
    return Chosen(artifact, choice, recipe, device, gpu, parallel)


def _usual_parallel(choice: ModelChoice, gpu: int, *, here: bool) -> int:
    """GPUs that the zoo starts this model on; here no more than there are, in powers of two."""
    usual = choice.recipe.tensor_parallel if choice.recipe else 1
    seen = len(nvidia_smi.visible(nvidia_smi.gpus())) - gpu if here else usual
    while usual > max(1, seen):
        usual //= 2
    return usual


def _known_weights(choice: ModelChoice) -> tuple[int | None, int | None]:
    """Bytes of the weights of a model of the zoo, in 16 bits, and of one number; weights on a hub
    are not looked at."""
    parameters = choice.recipe.parameters if choice.recipe else None
    return (None, None) if parameters is None else (2 * parameters, 2)


def artifact_in_tree(text: str, model: str | None) -> str:
    """The artifact of `model`, where `text` is a folder that holds several; else `text`.

    Raises:
        UsageError: several, and nobody says for which model.
        ArtifactNotFound, AmbiguousName: none of them is for `model`, or several are.
    """
    target = targets.parse(text)
    if not isinstance(target, targets.PathTarget) or not target.path.is_dir():
        return text
    path = target.path
    found = find_artifacts(path)
    if len(found) < 2:
        return text
    if model is None:
        one = shlex.quote(path_text(found[0]))
        hint = f"say which with --model MODEL, or name one: oscar-zoo serve {one}"
        raise UsageError(f"{text} holds {len(found)} artifacts.", hint=hint)
    wanted = model if Path(model).is_dir() else targets.parse_model(model, current()).model_id
    return path_text(artifact_of_model(path, wanted))


def _open(request: ServeRequest) -> Artifact:
    """The artifact; one that nobody has is computed, if that is wanted or somebody at a terminal
    agrees."""
    sources, target = Sources(request.hubs), targets.parse(request.artifact)
    with current() as observer:
        try:
            return open_artifact(target, sources, observer)
        except OscarZooError as error:
            if isinstance(target, targets.PathTarget):
                raise
            choice = model_to_compute(target, error, observer, model=request.model)
            if choice is None:
                raise
            if request.model is None:
                choice.check_can_be_had(with_folder("serve", request.artifact))
            ask = request.wish.ask and isinstance(error, ArtifactNotFound)
            plan = None
            if request.compute or ask:
                plan = plan_computing(choice, request.wish, error, observer)
            if plan is None or not (request.compute or observer.confirm(plan.question)):
                at = "" if request.model is None else f" --model {model_argument(request.model)}"
                line = compute_command("serve", request.artifact) + at
                raise refusal(error, line, choice) from None
        from oscar_zoo.app.obtain import obtain
        from oscar_zoo.registry.pins import PinFile
        from oscar_zoo.registry.trust import Trust

        trust = Trust(lock=PinFile.of_project(), write_lock=False)
        record = obtain(plan, trust, observer).pulled.artifact.record
        reference = Reference(record.id.model, record.id.tag, record.digest)
        folder = target.path if isinstance(target, targets.ModelTarget) else None
        return open_reference(reference, Sources(), observer, folder=folder)


def with_folder(command: str, artifact: str) -> str:
    """The command line that uses `artifact` with a model in a folder."""
    return f"oscar-zoo {command} {shlex.quote(artifact)} --model FOLDER"


def model_for(artifact: Artifact, model: str | None, *, again: str) -> ModelChoice:
    """The model to run with `artifact`: the one that was asked for, else its base model.

    Args:
        again: the command line that takes the FOLDER of the model.

    Raises:
        UsageError: nobody says which model, or no hub has it.
    """
    if model is not None:
        return targets.parse_model(model, current())
    if artifact.base_model is None:
        raise UsageError(
            "this artifact does not say which model it is for.", hint="add --model MODEL"
        )
    choice = targets.parse_model(artifact.base_model, current())
    choice.check_can_be_had(again)
    return choice


def recipe_for_model(
    artifact: Artifact, choice: ModelChoice, geometry: Geometry | None
) -> ServingRecipe:
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
        "neither the artifact nor the zoo has a serving recipe.",
        hint="serve an artifact with an oscar.json",
    )


def model_geometry(choice: ModelChoice) -> Geometry | None:
    """Geometry of a model before it is loaded: of a folder, whose files are looked at, or as the
    zoo knows it.

    Raises:
        InvalidModel, StorageError: a folder that is no model.
        UnsupportedModel: one that an INT2 cache cannot serve.
    """
    folder = Path(choice.source)
    if not folder.is_dir():
        return choice.recipe.geometry if choice.recipe else None
    preflight.check_folder(folder)
    return geometry_of_folder(folder, choice.model_id)
