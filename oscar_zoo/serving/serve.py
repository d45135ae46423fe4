"""Start stock SGLang with an INT2 cache: from a request to a server that is ready, or to the
command that would start it.

First whatever can be refused without an artifact, then the artifact, then what it does not go
together with, and only then a process.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

from oscar_zoo import paths
from oscar_zoo.artifact.artifact_folder import choose_artifact
from oscar_zoo.artifact.files import artifact_digest
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.outcome import Digest, says
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.requirements import require_serve
from oscar_zoo.engines.sglang import served_artifact
from oscar_zoo.engines.sglang.front.access import parse_origin
from oscar_zoo.engines.sglang.launch import flag_refusals, plan, preflight, starting
from oscar_zoo.engines.sglang.launch.plan import HARMFUL_VARIABLES
from oscar_zoo.engines.sglang.launch.starting import WantedServer
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.settings import ArtifactSource
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.errors import (
    AmbiguousName,
    DigestMismatchError,
    NetworkError,
    OscarZooError,
    PortInUse,
    UsageError,
)
from oscar_zoo.models import hardware
from oscar_zoo.next_step import Compute
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.artifacts import Artifact, open_folder, open_named
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import known_entries
from oscar_zoo.registry.targets import ModelChoice, ModelTarget, NameTarget, PathTarget
from oscar_zoo.registry.verify import artifacts_at
from oscar_zoo.serving.drafts import check_wish, choose_drafts
from oscar_zoo.serving.params import ServeParams
from oscar_zoo.serving.prepared import check_asked_gpus, check_served, prepare
from oscar_zoo.serving.records import key_for
from oscar_zoo.serving.running import RunningServer, launch
from oscar_zoo.serving.servers import check_port, serve_log

Missing = Callable[
    [ServeParams, ModelTarget | NameTarget, ModelChoice | None, OscarZooError, Observer], Artifact
]
"""What is done where a search found no artifact: one is computed, or the error is raised, with the
next step in it. `ModelChoice` is the model to serve it with, if the user named one."""


def start(params: ServeParams, observer: Observer, missing: Missing) -> RunningServer:
    params.check()
    key = key_for(params.expose, params.api_key_file, make=params.require_key)
    origins = tuple(map(parse_origin, params.allow_origin))
    device, gpu = check_machine(params)
    model, artifact = find(params, observer, missing, device)
    prepared = prepare(params, model, artifact, device, gpu, observer)
    choose_drafts(params, prepared, observer)
    wanted = WantedServer(
        **prepared.options(params),
        host=params.expose or plan.LOOPBACK,
        verified=artifact.verified,
        log=serve_log(params.port),
        timeout=params.timeout,
        api_key=key,
        origins=origins,
        engine_api=params.engine_api,
        environment={"HF_HUB_OFFLINE": "1"} if params.offline else {},
    )
    return launch(params, prepared, wanted, observer)


def check_machine(params: ServeParams) -> tuple[str, int]:
    """The device to serve on, and the number of its first GPU; refuses what this machine or SGLang
    cannot do, whatever the artifact is."""
    flags = UserFlags(params.flags)
    size = flags.sizes()
    require_serve()
    check_place(params)
    device, gpu = hardware.pick_serving_device(params.device)
    check_wish(params.drafts, flags, device)
    preflight.check_devices(Layout.of_flags(size, tp=size.tensor_parallel or 1), device, gpu)
    return device, gpu


def check_place(params: ServeParams) -> None:
    """Refuse a port that is taken, but first a name that nobody has an artifact for."""
    host = params.expose or plan.LOOPBACK
    try:
        check_port(host, params.port, lambda port: params.command_line(port=port))
    except PortInUse:
        target, makes = targets.parse(params.target), params.compute or params.ask
        if isinstance(target, NameTarget) and (target.choice is None or not makes):
            with contextlib.suppress(AmbiguousName, NetworkError):
                known_entries([target], Sources(params.hubs, offline=params.offline))
        raise


def find(
    params: ServeParams, observer: Observer, missing: Missing, device: str
) -> tuple[ModelChoice | None, Artifact]:
    """The model that the user named, if any, and the artifact to serve with it. A command that is
    only printed may run elsewhere, so `device` refuses no model then."""
    target = targets.parse(params.target)
    again = params.command_line(model="FOLDER")
    model = targets.parse_given_model(params.model, observer, again=again)
    choice = model or target.choice
    check_served(choice, params.revision, None if params.print_only else device)
    check_asked_gpus(choice, device, UserFlags(params.flags).sizes())
    if isinstance(target, PathTarget):
        return model, open_folder(_one_of_tree(target, model), observer)
    try:
        return model, open_named(target, Sources(params.hubs, offline=params.offline), observer)
    except OscarZooError as error:
        return model, missing(params, target, model, error, observer)


def _one_of_tree(target: PathTarget, model: ModelChoice | None) -> Path:
    """The folder of the one artifact at or below a path, or of the one for `model`."""
    place = artifacts_at(target.path)
    found = place.artifacts
    if len(found) == 1:
        return found[0]
    if model is None:
        one = quote(path_text(found[0]))
        hint = f"say which with --model MODEL, or name one of them, for example {one}"
        raise UsageError(f"{target} holds {len(found)} artifacts.", hint=hint)
    wanted = model.source if Path(model.source).is_dir() else model.model_id
    return choose_artifact(place.path, found, wanted)


@dataclass(frozen=True)
class ServeCommand:
    """What oscar-zoo serve --print prints: how a shell starts the server."""

    argv: Annotated[tuple[str, ...], says("The program and its arguments.")]
    env: Annotated[dict[str, str], says("Variables to set.")]
    unset: Annotated[
        tuple[str, ...], says("Variables to remove, because they run code or lower a guard.")
    ]
    artifact: Annotated[str, says("The artifact that is served.")]
    digest: Digest
    model: Annotated[str, says("Absolute path or hub id.")]
    recipe: ServingRecipe
    device: Annotated[str, says("cpu or cuda.")]
    tensor_parallel: Annotated[
        int, says("Ranks that share the model, each on a GPU or on a part of the CPU.", ge=1)
    ]
    drafts: Annotated[
        str | None, says("What --drafts chose for speculative decoding and why; null without it.")
    ]
    warnings: Annotated[
        tuple[str, ...],
        says(
            "Codes of verification, sentences about the status of the artifact, and remarks about"
            " the environment."
        ),
    ]
    engine: Literal["sglang"] = "sglang"
    schema: Literal["oscar-zoo.serve-command/1"] = "oscar-zoo.serve-command/1"


def command(params: ServeParams, observer: Observer, missing: Missing) -> ServeCommand:
    """The command for stock SGLang with this plugin, which reads and checks the artifact itself.
    Starts nothing, and needs no SGLang."""
    params.check()
    device, gpu = hardware.pick_serving_device(params.device, check=False)
    check_wish(params.drafts, UserFlags(params.flags), device)
    try:
        model, artifact = find(params, observer, missing, device)
    except NetworkError as error:
        hubs = [word for hub in params.hubs for word in ("--hub", hub)]
        fetch = f"fetch it once (oscar-zoo {shlex.join(['pull', str(params.target), *hubs])}), or "
        if isinstance(error.next_step, Compute):
            fetch = ""  # nobody is known to have it
        error.advice = f"--print needs its digest: {fetch}name a folder that holds it"
        raise
    prepared = prepare(params, model, artifact, device, gpu, observer)
    choose_drafts(params, prepared, observer)
    folder = None if artifact.installed else str(artifact.path.absolute())
    source = ArtifactSource(artifact=None if folder else artifact.label, folder=folder)
    planned = plan.plan(
        plan.ServeOptions(**prepared.options(params)),
        os.environ,
        rotations=source,
        sha256=_digest_to_read(artifact, source),
        kernels=starting.kernels_folder(),
    )
    replaced = flag_refusals.replaced_backends(prepared.flags)
    warnings = (*replaced, *flag_refusals.check_environment(planned.env))
    for warning in warnings:
        observer.note(Note("server.environment", warning))
    env = dict(planned.sets)
    if artifact.installed and os.environ.get(paths.CACHE):
        env[paths.CACHE] = str(paths.cache_dir())  # absolute, for a shell in any folder
    if params.offline:
        env["HF_HUB_OFFLINE"] = "1"
    return ServeCommand(
        argv=planned.argv,
        env=env,
        unset=tuple(name for name in HARMFUL_VARIABLES if name not in env),
        artifact=artifact.label,
        digest=artifact.verified.digest,
        model=prepared.model,
        recipe=prepared.recipe,
        device=device,
        tensor_parallel=prepared.tensor_parallel,
        drafts=prepared.drafts,
        warnings=(*artifact.warnings, *warnings),
    )


def _digest_to_read(artifact: Artifact, source: ArtifactSource) -> str:
    """The digest of what a server will read; raises where its bytes are no more those that were
    verified."""
    served, verified = served_artifact.load(source), artifact.verified
    names = served.names.values()
    pair = artifact_digest([file for file in verified.files if file.path in names])
    if served.digest not in (verified.digest, pair):
        raise DigestMismatchError.for_content(served.where, want=pair, got=served.digest)
    return served.digest
