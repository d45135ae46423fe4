"""A server of one's own for a measurement: started as `serve` starts it, on a free port, gone when
the block ends."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from oscar_zoo import paths
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.bench.run import free_port
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.starting import phases_of
from oscar_zoo.engines.sglang.launch import plan, server, staging
from oscar_zoo.engines.sglang.settings import ArtifactSource
from oscar_zoo.evaluate.server_client import ServerClient


@dataclass(frozen=True)
class Wanted:
    """What to serve, and how.

    Attributes:
        label: what to call it on the terminal.
        log: name of its log, without the folder.
        model: local folder or hub id, at `revision`.
        verified: the artifact.
        recipe: in force.
        device: `cpu` or `cuda`.
        flags: for the engine.
        timeout: seconds that its start may take.
        gpu: number of the first GPU.
    """

    label: str
    log: str
    model: str
    revision: str | None
    verified: Verified
    recipe: ServingRecipe
    device: str
    flags: tuple[str, ...]
    timeout: float
    gpu: int = 0


@contextmanager
def own_server(
    wanted: Wanted, *, environment: Mapping[str, str] | None = None, silent: bool
) -> Iterator[tuple[server.Server, ServerClient]]:
    """Start it and wait until it is healthy.

    Args:
        environment: variables for the engine beside those of this process.
        silent: show nothing.

    Raises:
        ServerFailed: it did not start.
        VerificationFailed: the artifact has one side only.
    """
    with ExitStack() as stack:
        staged = stack.enter_context(staging.private_folder()) / "rotations"
        digest = staging.stage_rotations(wanted.verified, staged)
        options = plan.ServeOptions(
            model=wanted.model,
            revision=wanted.revision,
            rotations=ArtifactSource(folder=str(staged)),
            rotations_sha256=digest,
            recipe=wanted.recipe,
            kernels=staging.kernels_folder(),
            device=wanted.device,
            gpu=wanted.gpu,
            port=free_port(),
            extra=wanted.flags,
        )
        planned = plan.plan(options, {**os.environ, **(environment or {})})
        folder = paths.state_dir() / "logs"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = folder / f"{wanted.log}.log"
        terminal.note(f"Starting SGLang: {wanted.label} (log: {log})", quiet=silent)
        child = stack.enter_context(server.running(planned, log))
        with phases_of(log, enabled=not silent) as tick:
            child.wait_until_healthy(wanted.timeout, tick)
        staging.check_unchanged(staged, digest)
        yield child, ServerClient(planned.url, timeout=wanted.timeout)
