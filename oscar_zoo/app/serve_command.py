"""The command that would serve an artifact, as data. Starts nothing, and needs no SGLang."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from oscar_zoo import paths
from oscar_zoo.app.arguments import command_line, option_words
from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.app.compute_wish import model_to_compute
from oscar_zoo.app.draft_choice import DraftChoice, choose_drafts, wish_of
from oscar_zoo.app.prepare_serve import Prepared, check_asked_gpus, check_groups, prepare
from oscar_zoo.app.refused_models import check_served
from oscar_zoo.app.serve_artifact import open_to_serve
from oscar_zoo.app.serve_request import ServeRequest
from oscar_zoo.artifact.files import artifact_digest
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.sglang import artifact_reading
from oscar_zoo.engines.sglang.launch import draft_flags, flag_refusals, plan, staging
from oscar_zoo.engines.sglang.launch.environment import HARMFUL_VARIABLES
from oscar_zoo.engines.sglang.served_artifact import ServedArtifact
from oscar_zoo.engines.sglang.settings import ArtifactSource
from oscar_zoo.errors import DigestMismatchError, NetworkError, UsageError
from oscar_zoo.models.hardware import pick_serving_device
from oscar_zoo.next_step import Compute
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import is_published
from oscar_zoo.registry.targets import ModelChoice, PathTarget


@dataclass(frozen=True)
class ServeCommand:
    """A command for a shell, with what it serves.

    Attributes:
        argv: the argument list.
        environment: variables to set.
        unset: variables to remove, because they run code or lower a guard.
        warnings: remarks about flags and the environment, one sentence each.
        artifact_warnings: codes of verification, and sentences about the status of the artifact.
        artifact: label of the artifact.
        digest: digest of the artifact.
        model: absolute path or hub id.
        recipe: serving recipe in force.
        device: `cpu` or `cuda`.
        tensor_parallel: ranks that share the model, each on a GPU or a part of the CPU.
        drafts: what was chosen for speculative decoding, in words; `None` where nobody asked.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    unset: tuple[str, ...]
    warnings: tuple[str, ...]
    artifact_warnings: tuple[str, ...]
    artifact: str
    digest: str
    model: str
    recipe: ServingRecipe
    device: str
    tensor_parallel: int
    drafts: str | None = None


def command(request: ServeRequest, observer: Observer = SILENT) -> ServeCommand:
    """Make the command for stock SGLang with this plugin."""
    flags, size, asked_drafts = request.flags, request.flags.sizes(), wish_of(request.drafts)
    if request.api_key_file is not None or request.require_key or request.expose is not None:
        raise UsageError(
            "--print shows no API key, and without one nothing is exposed.",
            hint=(
                "print it without --expose, --api-key-file and --require-key; SGLang reads address"
                " and key from a file: --config FILE"
            ),
        )
    if request.allow_origin or request.engine_api:
        raise UsageError(
            "--print shows a front with its usual settings.",
            hint="leave out --allow-origin and --engine-api",
        )
    device, gpu = pick_serving_device(request.device, check=False)
    draft_flags.check_wish(asked_drafts, flags, device)
    sources = Sources(request.hubs, offline=request.offline)
    wish = request.wish(offline=sources.offline)
    again = partial(request.command_line, print=True)
    model = targets.parse_given_model(request.model, observer, again=again(model="FOLDER"))
    check_served(model or request.target.choice, request.revision)
    check_asked_gpus(model or request.target.choice, device, size)
    try:
        artifact = open_to_serve(request.target, model, sources, wish, observer, again=again)
    except NetworkError as error:
        error.advice = _what_is_missing(request, model, error)
        raise
    prepared = prepare(
        artifact,
        observer,
        again=again(model="FOLDER"),
        model=model,
        clip=request.clip,
        device=device,
        gpu=gpu,
        flags=size,
        usual_gpus=request.device is not None,
    )
    check_groups(prepared, flags)
    drafts = choose_drafts(asked_drafts, prepared, flags, request.revision, observer)
    return _stock(prepared, request.port, request.revision, drafts, offline=request.offline)


def _what_is_missing(request: ServeRequest, model: ModelChoice | None, error: NetworkError) -> str:
    """What to do where no hub can be asked for the artifact, without which there is no command.

    Args:
        error: why there is no artifact; its next step may be to compute one.
    """
    target, options = request.target, option_words({"hub": request.hubs})
    if isinstance(error.next_step, Compute) or isinstance(target, PathTarget):
        return "--print needs its digest: name a folder that holds it"
    name, verb = str(target), "fetch"
    if model_to_compute(target, error, model) is not None and not is_published(target):
        name, verb = request.model or name, "fetch or compute"
        options.append("--compute")
    fetch = command_line(["pull", name, *options])
    return f"--print needs its digest: {verb} it once ({fetch}), or name a folder that holds it"


def _stock(
    prepared: Prepared,
    port: int,
    revision: str | None,
    drafts: DraftChoice,
    *,
    offline: bool,
) -> ServeCommand:
    """For stock SGLang with this plugin, which reads and checks the artifact itself."""
    artifact = prepared.artifact
    source = (
        ArtifactSource(artifact=artifact.label)
        if artifact.installed
        else ArtifactSource(folder=str(artifact.path.absolute()))
    )
    options = plan.ServeOptions(
        model=prepared.model,
        revision=revision,
        rotations=source,
        rotations_sha256=_as_verified(artifact, source).digest,  # as the plugin will read it
        recipe=prepared.recipe,
        kernels=staging.kernels_folder(),
        device=prepared.device,
        gpu=prepared.gpu,
        tensor_parallel=prepared.tensor_parallel,
        port=port,
        name=prepared.name,
        served_name=prepared.served_name,
        flags=drafts.flags,
    )
    planned = plan.plan(options, os.environ)
    replaced = flag_refusals.replaced_backends(drafts.flags)
    warnings = (*replaced, *flag_refusals.check_environment(planned.env))
    environment = dict(planned.sets)
    if artifact.installed and os.environ.get(paths.CACHE):
        environment[paths.CACHE] = str(paths.cache_dir())  # absolute, for a shell in any folder
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    unset = tuple(name for name in HARMFUL_VARIABLES if name not in environment)
    made = _command(prepared, planned.argv, environment, unset, warnings)
    return replace(made, drafts=drafts.told)


def _as_verified(artifact: Artifact, source: ArtifactSource) -> ServedArtifact:
    """What a server will read; raises where its bytes are no more those that were verified."""
    served, verified = artifact_reading.load(source), artifact.verified
    names = served.names.values()
    pair = artifact_digest([file for file in verified.files if file.path in names])
    if served.digest not in (verified.digest, pair):
        raise DigestMismatchError.for_content(served.where, want=pair, got=served.digest)
    return served


def _command(
    prepared: Prepared,
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    unset: tuple[str, ...],
    warnings: tuple[str, ...],
) -> ServeCommand:
    return ServeCommand(
        argv=argv,
        environment=environment,
        unset=unset,
        warnings=warnings,
        artifact_warnings=prepared.artifact.warnings,
        artifact=prepared.artifact.label,
        digest=prepared.artifact.verified.digest,
        model=prepared.model,
        recipe=prepared.recipe,
        device=prepared.device,
        tensor_parallel=prepared.tensor_parallel,
    )
