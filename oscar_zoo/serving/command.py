"""The command that would serve an artifact, as data. Starts nothing, and needs no SGLang."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from oscar_zoo import paths
from oscar_zoo.artifact.files import artifact_digest
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.sglang import served_artifact
from oscar_zoo.engines.sglang.launch import flag_refusals, plan, starting
from oscar_zoo.engines.sglang.launch.plan import HARMFUL_VARIABLES
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.served_artifact import ServedArtifact
from oscar_zoo.engines.sglang.settings import ArtifactSource
from oscar_zoo.errors import DigestMismatchError, NetworkError, UsageError
from oscar_zoo.models.hardware import pick_serving_device
from oscar_zoo.next_step import Compute
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry.artifacts import Artifact
from oscar_zoo.serving.drafts import DraftChoice, check_wish, choose_drafts
from oscar_zoo.serving.params import ServeParams
from oscar_zoo.serving.prepared import Prepared, prepare
from oscar_zoo.serving.serve import Missing, find


@dataclass(frozen=True)
class ServeCommand:
    """A command for a shell, with what it serves.

    Attributes:
        argv: the argument list.
        environment: variables to set.
        unset: variables to remove, because they run code or lower a guard.
        warnings: codes of verification, and sentences about the status of the artifact, the flags
            and the environment.
        drafts: what was chosen for speculative decoding, in words; `None` where nobody asked.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    unset: tuple[str, ...]
    warnings: tuple[str, ...]
    artifact: str
    digest: str
    model: str
    recipe: ServingRecipe
    device: str
    tensor_parallel: int
    drafts: str | None


def command(params: ServeParams, observer: Observer, missing: Missing) -> ServeCommand:
    """Make the command for stock SGLang with this plugin."""
    params.check()
    if params.api_key_file is not None or params.require_key or params.expose is not None:
        raise UsageError(
            "--print shows no API key, and without one nothing is exposed.",
            hint=(
                "print it without --expose, --api-key-file and --require-key; SGLang reads address"
                " and key from a file: --config FILE"
            ),
        )
    if params.allow_origin or params.engine_api:
        raise UsageError(
            "--print shows a front with its usual settings.",
            hint="leave out --allow-origin and --engine-api",
        )
    device, gpu = pick_serving_device(params.device, check=False)
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
    return _command(params, prepared, choose_drafts(params, prepared, observer), observer)


def _command(
    params: ServeParams, prepared: Prepared, drafts: DraftChoice, observer: Observer
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
        revision=params.revision,
        recipe=prepared.recipe,
        device=prepared.device,
        gpu=prepared.gpu,
        tensor_parallel=prepared.tensor_parallel,
        port=params.port,
        name=prepared.name,
        served_name=prepared.served_name,
        flags=drafts.flags,
    )
    read = _as_verified(artifact, source)  # as the plugin will read it
    staged = plan.Staged(source, read.digest, starting.kernels_folder())
    planned = plan.plan(options, staged, os.environ)
    replaced = flag_refusals.replaced_backends(drafts.flags)
    warnings = (*replaced, *flag_refusals.check_environment(planned.env))
    for warning in warnings:
        observer.note(Note("server.environment", warning))
    environment = dict(planned.sets)
    if artifact.installed and os.environ.get(paths.CACHE):
        environment[paths.CACHE] = str(paths.cache_dir())  # absolute, for a shell in any folder
    if params.offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return ServeCommand(
        argv=planned.argv,
        environment=environment,
        unset=tuple(name for name in HARMFUL_VARIABLES if name not in environment),
        warnings=(*artifact.warnings, *warnings),
        artifact=artifact.label,
        digest=artifact.verified.digest,
        model=prepared.model,
        recipe=prepared.recipe,
        device=prepared.device,
        tensor_parallel=prepared.tensor_parallel,
        drafts=drafts.told,
    )


def _as_verified(artifact: Artifact, source: ArtifactSource) -> ServedArtifact:
    """What a server will read; raises where its bytes are no more those that were verified."""
    served, verified = served_artifact.load(source), artifact.verified
    names = served.names.values()
    pair = artifact_digest([file for file in verified.files if file.path in names])
    if served.digest not in (verified.digest, pair):
        raise DigestMismatchError.for_content(served.where, want=pair, got=served.digest)
    return served
