"""The `serve` use case on a terminal: verify, stage, start, wait, report, stop."""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_zoo.app import server_records
from oscar_zoo.app.api_key import read_key
from oscar_zoo.app.devices import require_serve
from oscar_zoo.app.servers import check_port, serve_log
from oscar_zoo.cli.choosing import Chosen, ServeRequest, choose
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.ready import print_ready, ready_facts
from oscar_zoo.cli.serve_command import command_line
from oscar_zoo.cli.starting import phases_of
from oscar_zoo.engines.sglang.launch import flag_refusals, plan, server, staging
from oscar_zoo.engines.sglang.launch.processes import Process
from oscar_zoo.engines.sglang.launch.ready import read_facts
from oscar_zoo.engines.sglang.settings import ArtifactSource
from oscar_zoo.errors import ServerFailed, UsageError
from oscar_zoo.evaluate.server_client import ServerClient

ANSWER_SECONDS = 60.0
"""How long a server that is ready may take to describe itself."""
NO_MODEL = re.compile(
    r"couldn't connect to|is not a local folder|RepositoryNotFound|LocalEntryNotFound"
)
"""What transformers and the hub's client say when no hub has a model, or none can be asked."""


@dataclass(frozen=True)
class _Prepared:
    chosen: Chosen
    plan: plan.LaunchPlan
    staged: Path
    staged_digest: str
    key: str | None


def serve(request: ServeRequest) -> int:
    """Run `serve` until the server ends or is told to stop; the exit code."""
    plan.check_extra_flags(request.extra)
    _check_exposure(request)
    request.wish.check()
    require_serve()
    check_port(
        request.expose or plan.LOOPBACK,
        request.port,
        lambda port: command_line(request, port=port),
    )
    chosen = choose(request)
    with ExitStack() as stack:
        private = stack.enter_context(staging.private_folder())
        return _run(request, _prepare(request, chosen, private))


def _check_exposure(request: ServeRequest) -> None:
    if request.expose is not None and request.api_key_file is None:
        raise UsageError(
            f"listening on {request.expose} needs an API key.",
            hint="put one into a file and add --api-key-file FILE",
        )
    if request.api_key_file is not None:
        read_key(request.api_key_file)


def _prepare(request: ServeRequest, chosen: Chosen, private: Path) -> _Prepared:
    staged = private / "rotations"
    digest = staging.stage_rotations(chosen.artifact.verified, staged)
    key = key_file = None
    if request.api_key_file is not None:
        key = read_key(request.api_key_file)
        key_file = staging.write_key_file(private, key)
    options = chosen.options(request, ArtifactSource(folder=str(staged)), digest, key=key_file)
    planned = plan.plan(options, os.environ)
    for warning in flag_refusals.check_environment(planned.env):
        terminal.note(f"note: {warning}", quiet=request.silent)
    return _Prepared(chosen, planned, staged, digest, key)


def _run(request: ServeRequest, prepared: _Prepared) -> int:
    silent = request.silent
    log = serve_log(request.port)
    started = time.monotonic()
    terminal.note(f"Starting SGLang for {prepared.chosen.choice.source} (log: {log})", quiet=silent)
    ready = False
    try:
        with server_records.registered(_record(request, prepared, log)) as entry:
            with server.running(prepared.plan, log) as child:
                with phases_of(log, enabled=not silent) as tick:
                    child.wait_until_healthy(request.timeout, tick)
                staging.check_unchanged(prepared.staged, prepared.staged_digest)
                facts = _facts(request, prepared, log, time.monotonic() - started)
                ready = True
                entry.change(state="ready", model=facts["model_id"])
                terminal.emit_json(facts) if request.as_json else print_ready(facts, stop="Ctrl-C")
                child.wait()
                raise child.failure("the server ended")
    except KeyboardInterrupt:
        if not ready:
            raise
        terminal.note("Stopped.", quiet=silent)
        return 130
    except SystemExit:
        if not ready:
            raise
        terminal.note("Stopped by SIGTERM.", quiet=silent)
        return 0
    except ServerFailed as error:
        if not ready:
            raise without_model(request, prepared.chosen.choice.source, error) from None
        if not request.as_json:
            raise
        terminal.print_error(
            error.code, error.message, error.hint, as_json=False
        )  # stdout has its one object
        return 1


def without_model(request: ServeRequest, source: str, error: ServerFailed) -> ServerFailed:
    """The same error; where no hub gave the model `source`, with the command for a model in a
    folder."""
    if Path(source).is_dir() or not NO_MODEL.search(error.message):
        return error
    again = command_line(request, model="DIR")
    return ServerFailed(error.message, hint=f"if {source} lies in a folder: {again}; {error.hint}")


def _record(request: ServeRequest, prepared: _Prepared, log: Path) -> server_records.ServerRecord:
    me = Process.of(os.getpid())
    assert me is not None
    return server_records.ServerRecord(
        process=me,
        port=request.port,
        url=f"{prepared.plan.url}/v1",
        model=prepared.chosen.choice.model_id,
        artifact=prepared.chosen.artifact.label,
        log=str(log),
        since=server_records.now(),
        state="starting",
    )


def _facts(request: ServeRequest, prepared: _Prepared, log: Path, seconds: float) -> dict[str, Any]:
    """What the running server says of itself, and what we know of it."""
    ready = read_facts(
        ServerClient(server.client_url(prepared.plan.url), timeout=ANSWER_SECONDS, key=prepared.key)
    )
    facts = ready_facts(request, prepared.chosen, ready, server.client_url(prepared.plan.url))
    return facts | {
        "url": f"{prepared.plan.url}/v1",
        "log": str(log),
        "seconds": round(seconds, 1),
        "pid": os.getpid(),
    }
