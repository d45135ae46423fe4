"""`serve --print`: the command that would be run, for a shell or as data. Starts nothing, and needs
no SGLang."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.artifact.formats import Role
from oscar_zoo.cli.choosing import Chosen, ServeRequest, choose
from oscar_zoo.cli.render import terminal
from oscar_zoo.engines.sglang import flags, served_artifact
from oscar_zoo.engines.sglang.launch import flag_refusals, fork_command, plan
from oscar_zoo.engines.sglang.settings import ArtifactSource
from oscar_zoo.errors import UsageError

STORE = "OSCAR_ZOO_CACHE"
"""Variable that moves the store; the plugin finds an artifact by name there."""


def print_command(request: ServeRequest) -> int:
    """Print the command; the exit code.

    Raises:
        UsageError: a key, which no command line may show; or an artifact that the fork cannot read.
        OscarZooError: as `choose`.
    """
    plan.check_extra_flags(request.extra)
    if request.api_key_file is not None or request.expose is not None:
        raise UsageError(
            "--print shows no API key, and without one nothing is exposed.",
            hint=(
                "print it without --expose and --api-key-file; SGLang reads both from a file:"
                " --config FILE"
            ),
        )
    fork = request.engine == "oscar-fork"
    if fork and request.device is None:
        request = replace(request, device="cuda")  # it knows nothing else
    chosen = choose(request, here=False)
    if fork:
        argv, env = _fork(request, chosen)
        unset: tuple[str, ...] = ()
    else:
        argv, env = _stock(request, chosen)
        unset = tuple(name for name in plan.HARMFUL_VARIABLES if name not in env)
    if request.as_json:
        _emit(request, chosen, argv, env, unset)
    else:
        sys.stdout.write(
            for_shell(argv, env, [name for name in unset if name in os.environ]) + "\n"
        )
    return 0


def for_shell(argv: Sequence[str], env: Mapping[str, str], unset: Sequence[str] = ()) -> str:
    """One command that a shell runs as it stands, with one flag or variable per line."""
    program = next((i for i, part in enumerate(argv) if part.startswith("--")), len(argv))
    words = ["env", *(f"-u {shlex.quote(name)}" for name in unset)]
    words += [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    words.append(shlex.join(argv[:program]))
    words += [shlex.quote(part) for part in argv[program:]]
    return " \\\n  ".join([" ".join(words[:2]), *words[2:]])


def _stock(request: ServeRequest, chosen: Chosen) -> tuple[tuple[str, ...], dict[str, str]]:
    artifact = chosen.artifact
    source = (
        ArtifactSource(artifact=artifact.label)
        if artifact.installed
        else ArtifactSource(folder=str(artifact.path.absolute()))
    )
    digest = served_artifact.load(source).digest  # as the plugin will read it
    planned = plan.plan(chosen.options(request, source, digest, key=None), os.environ)
    for warning in flag_refusals.check_environment(planned.env):
        terminal.note(f"note: {warning}", quiet=request.silent)
    env = dict(planned.sets)
    if artifact.installed and STORE in os.environ:
        env[STORE] = os.environ[STORE]
    if request.offline:
        env["HF_HUB_OFFLINE"] = "1"
    return planned.argv, env


def _fork(request: ServeRequest, chosen: Chosen) -> tuple[tuple[str, ...], dict[str, str]]:
    verified = chosen.artifact.verified
    if verified.k is None or verified.v is None:
        raise UsageError(f"{chosen.artifact.label} has no K and V rotation.")
    fork_command.check_format(verified.k, verified.v)
    options = fork_command.ForkOptions(
        model=chosen.model,
        k_file=_file(chosen.artifact, "k"),
        v_file=_file(chosen.artifact, "v"),
        head_dim=verified.k.head_dim,
        recipe=chosen.recipe,
        tensor_parallel=(
            chosen.tensor_parallel if flags.tensor_parallel(request.extra) is None else None
        ),
        host=plan.LOOPBACK,
        port=request.port,
        revision=request.revision,
        extra=request.extra,
    )
    return fork_command.argv(options), fork_command.variables(options)


def _file(artifact: Artifact, role: Role) -> Path:
    """The file of one side, as the verified bytes were named."""
    served = served_artifact.load(ArtifactSource(folder=str(artifact.path)))
    return artifact.path.absolute() / served.names[role]


def _emit(
    request: ServeRequest,
    chosen: Chosen,
    argv: Sequence[str],
    env: Mapping[str, str],
    unset: Sequence[str],
) -> None:
    facts: dict[str, Any] = {"schema": "oscar-zoo.serve-command/1", "engine": request.engine}
    facts |= {"argv": list(argv), "env": dict(env), "unset": list(unset)}
    facts |= {"artifact": chosen.artifact.label, "digest": chosen.artifact.verified.digest}
    facts |= {"model": chosen.model, "recipe": chosen.recipe.model_dump(mode="json")}
    facts |= {"device": chosen.device, "tensor_parallel": chosen.tensor_parallel}
    terminal.emit_json(facts)
