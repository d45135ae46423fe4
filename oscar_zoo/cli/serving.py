"""The `serve` use case on a terminal: verify, stage, start, wait, report, stop."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_zoo import paths
from oscar_zoo.cli import render
from oscar_zoo.cli.choosing import Chosen, ServeRequest, choose
from oscar_zoo.cli.loading import require_serve
from oscar_zoo.errors import PathNotFound, ServerFailed, UsageError
from oscar_zoo.sglang_plugin import fork_environment, launch, server, staging
from oscar_zoo.sglang_plugin.settings import Source


@dataclass(frozen=True)
class _Prepared:
    chosen: Chosen
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
    chosen = choose(request)
    with ExitStack() as stack:
        private = stack.enter_context(staging.private_folder())
        return _run(request, _prepare(request, chosen, private))


def _check_exposure(request: ServeRequest) -> None:
    if request.expose is not None and request.api_key_file is None:
        raise UsageError(
            f"listening on {request.expose} needs an API key.", hint="put one into a file and add --api-key-file FILE"
        )
    if request.api_key_file is not None and not request.api_key_file.is_file():
        raise PathNotFound.for_path(request.api_key_file, "key file")


def _prepare(request: ServeRequest, chosen: Chosen, private: Path) -> _Prepared:
    staged = private / "rotations"
    digest = staging.stage_rotations(chosen.artifact.verified, staged)
    key_file = None
    if request.api_key_file is not None:
        key = request.api_key_file.read_text("utf-8").strip()
        if not key or any(ord(c) < 32 for c in key):
            raise UsageError(f"{request.api_key_file} does not hold one line with a key.")
        key_file = staging.write_key_file(private, key)
    options = chosen.options(request, Source(folder=str(staged)), digest, key=key_file)
    plan = launch.plan(options, os.environ)
    for warning in fork_environment.check(plan.env):
        render.note(f"note: {warning}", quiet=request.silent)
    return _Prepared(chosen, plan, staged, digest)


def _run(request: ServeRequest, prepared: _Prepared) -> int:
    silent = request.silent
    log = _log_file(request.port)
    started = time.monotonic()
    render.note(f"Starting SGLang for {prepared.chosen.choice.source} (log: {log})", quiet=silent)
    ready = False
    try:
        with server.running(prepared.plan, log) as child:
            with render.waiting("waiting for the server", enabled=not silent) as tick:
                child.wait_until_healthy(request.timeout, tick)
            staging.check_unchanged(prepared.staged, prepared.staged_digest)
            ready = True
            _report(request, prepared, log, time.monotonic() - started)
            child.wait()
            raise child.failure("the server ended")
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
    recipe, artifact, url = prepared.chosen.recipe, prepared.chosen.artifact, prepared.plan.url
    if request.as_json:
        facts: dict[str, Any] = {"schema": "oscar-zoo.serve/1", "url": f"{url}/v1", "artifact": artifact.label}
        facts |= {"digest": artifact.verified.digest, "model": prepared.chosen.choice.source, "log": str(log)}
        facts |= {"recipe": recipe.model_dump(mode="json"), "seconds": round(seconds, 1), "pid": os.getpid()}
        render.emit_json(facts)
        return
    console = render.out()
    console.print(f"{render.clean(artifact.label)}  {artifact.verified.digest}")
    console.print(f"verified to level {artifact.verified.level}; serving {render.clean(prepared.chosen.choice.source)}")
    console.print(
        f"INT2 cache: {recipe.bits_per_element:.2f} bits per element, K clip {recipe.clip.k}, V clip {recipe.clip.v}, "
        f"first {recipe.windows.sink} and last {recipe.windows.recent} tokens in {recipe.windows.dtype}"
    )
    console.print(f"Ready    {url}/v1   ({seconds:.0f} s)      stop with Ctrl-C")
