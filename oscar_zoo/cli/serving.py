"""The `serve` use case on a terminal: verify, stage, start, wait, report, stop."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_zoo import paths
from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.cli import render
from oscar_zoo.cli.artifacts import OpenArtifact, open_artifact, open_reference
from oscar_zoo.cli.loading import pick_serving_device, require_serve, with_overrides
from oscar_zoo.cli.models import ModelChoice, choose_model, serving_recipe
from oscar_zoo.cli.offering import Wish, agreed, can_ask, command_line, model_to_compute, plan_computing, refusal
from oscar_zoo.cli.targets import model_folder
from oscar_zoo.errors import ArtifactNotFound, OscarZooError, PathNotFound, ServerFailed, UsageError
from oscar_zoo.hubs import config
from oscar_zoo.sglang_plugin import launch, server, staging


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
class _Prepared:
    artifact: OpenArtifact
    choice: ModelChoice
    recipe: ServingRecipe
    plan: launch.LaunchPlan
    staged: Path
    staged_digest: str


def serve(request: ServeRequest) -> int:
    """Run `serve` until the server ends or is told to stop; the exit code."""
    launch.check_extra_flags(request.extra)
    _check_exposure(request)
    request.wish.check()
    require_serve()
    server.check_port_free(request.expose or launch.LOOPBACK, request.port)
    with ExitStack() as stack:
        private = stack.enter_context(staging.private_folder())
        return _run(request, _prepare(request, private))


def _check_exposure(request: ServeRequest) -> None:
    if request.expose is not None and request.api_key_file is None:
        raise UsageError(
            f"listening on {request.expose} needs an API key.", hint="put one into a file and add --api-key-file FILE"
        )
    if request.api_key_file is not None and not request.api_key_file.is_file():
        raise PathNotFound.for_path(request.api_key_file, "key file")


def _prepare(request: ServeRequest, private: Path) -> _Prepared:
    artifact = _open(request)
    choice = model_for(artifact, request.model)
    recipe = with_overrides(recipe_for_model(artifact, choice, model_geometry(choice)), clip=request.clip)
    staged = private / "rotations"
    digest = staging.stage_rotations(artifact.verified, staged)
    key_file = None
    if request.api_key_file is not None:
        key = request.api_key_file.read_text("utf-8").strip()
        if not key or any(ord(c) < 32 for c in key):
            raise UsageError(f"{request.api_key_file} does not hold one line with a key.")
        key_file = staging.write_key_file(private, key)
    device, gpu = pick_serving_device(request.device)
    wanted = launch.ServeOptions(
        model=choice.source,
        revision=request.revision,
        rotations=staged,
        rotations_sha256=digest,
        recipe=recipe,
        kernels=staging.kernels_folder(),
        device=device,
        gpu=gpu,
        host=request.expose or launch.LOOPBACK,
        port=request.port,
        config_file=key_file,
        extra=request.extra,
    )
    return _Prepared(artifact, choice, recipe, launch.plan(wanted, os.environ), staged, digest)


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
    """Geometry of a model before it is loaded: of a folder, whose files are looked at, or as the zoo knows it."""
    if not Path(choice.source).is_dir():
        return choice.recipe.geometry if choice.recipe else None
    from oscar_zoo.evaluate.models import check_model_folder, inspect_model

    check_model_folder(Path(choice.source))
    return inspect_model(choice.source, model_id=choice.model_id).geometry


def _run(request: ServeRequest, prepared: _Prepared) -> int:
    silent = request.silent
    log = _log_file(request.port)
    started = time.monotonic()
    render.note(f"Starting SGLang for {prepared.choice.source} (log: {log})", quiet=silent)
    ready = False
    try:
        with server.running(prepared.plan, log) as child:
            with render.waiting("waiting for the server", enabled=not silent) as tick:
                child.wait_until_healthy(request.timeout, tick)
            staging.check_unchanged(prepared.staged, prepared.staged_digest)
            ready = True
            _report(request, prepared, log, time.monotonic() - started)
            child.wait()
            raise ServerFailed(f"the server ended ({child.status}): {child.cause()}.", hint=f"log: {log}")
    except KeyboardInterrupt:
        if not ready:
            raise
        render.note("Stopped.", quiet=silent)
        return 130
    except SystemExit:
        if not ready:
            raise
        render.note("Stopped by SIGTERM.", quiet=silent)
        return 0
    except ServerFailed as error:
        if not (ready and request.as_json):
            raise
        render.print_error(error.code, error.message, error.hint, as_json=False)  # stdout has its one object
        return 1


def _log_file(port: int) -> Path:
    folder = paths.state_dir() / "logs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"serve-{port}.log"


def _report(request: ServeRequest, prepared: _Prepared, log: Path, seconds: float) -> None:
    recipe, artifact, url = prepared.recipe, prepared.artifact, prepared.plan.url
    if request.as_json:
        facts: dict[str, Any] = {"schema": "oscar-zoo.serve/1", "url": f"{url}/v1", "artifact": artifact.label}
        facts |= {"digest": artifact.verified.digest, "model": prepared.choice.source, "log": str(log)}
        facts |= {"recipe": recipe.model_dump(mode="json"), "seconds": round(seconds, 1), "pid": os.getpid()}
        render.emit_json(facts)
        return
    console = render.out()
    console.print(f"{render.clean(artifact.label)}  {artifact.verified.digest}")
    console.print(f"verified to level {artifact.verified.level}; serving {render.clean(prepared.choice.source)}")
    console.print(
        f"INT2 cache: {recipe.bits_per_element:.2f} bits per element, K clip {recipe.clip.k}, V clip {recipe.clip.v}, "
        f"first {recipe.windows.sink} and last {recipe.windows.recent} tokens in {recipe.windows.dtype}"
    )
    console.print(f"Ready    {url}/v1   ({seconds:.0f} s)      stop with Ctrl-C")
