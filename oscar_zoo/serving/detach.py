"""Start `oscar-zoo serve` in a session of its own, so that the server outlives the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import TypeAdapter

from oscar_zoo import children
from oscar_zoo.children import Child
from oscar_zoo.engines.sglang.launch.processes import Signals
from oscar_zoo.engines.sglang.launch.server_log import PhaseReader, open_private
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags, replaced_backends
from oscar_zoo.errors import ServerFailed
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry.targets import PathTarget, parse
from oscar_zoo.serving.params import ServeParams
from oscar_zoo.serving.serve import Missing, ReadyServer, check_machine, check_place, find
from oscar_zoo.serving.servers import serve_log

PROGRAM = "from oscar_zoo.cli.main import main; main()"
POLL_SECONDS = 0.5
CHECKING = "checking model and artifact"
"""What is said until the engine starts: artifact and weights may be fetched then, too."""
ENDING_SECONDS = 60.0
"""Seconds that a server that is no longer wanted may take to end."""


class Refused(NamedTuple):
    """The error of a `serve` in the background, and its exit code."""

    code: str
    message: str
    hint: str | None
    status: int


def start_detached(
    params: ServeParams, observer: Observer, missing: Missing
) -> ReadyServer | Refused:
    """Start a server in the background and wait until it is ready.

    An artifact that may have to be computed is found by this process, which tells the observer of
    it as `serve` does; only the server goes into the background.
    """
    params.check()
    check_place(params)
    log = serve_log(params.port)
    log.unlink(missing_ok=True)  # its phases are shown, and it tells that the engine was started
    for warning in replaced_backends(UserFlags(params.of_sglang)):  # the child's go to a file
        observer.note(Note("server.environment", warning))
    by_name = not isinstance(parse(params.target), PathTarget)
    may_compute = by_name and (params.compute or params.ask)
    if may_compute:
        device, _ = check_machine(params)
        find(params, observer, missing, device)
        observer.begin((), timed=False)
    # a hub that was named does not have what was computed; the zoo of this user does
    compute = params.compute or may_compute
    arguments = params.arguments(detach=False, json=True, port=params.port, compute=compute)
    with _child(arguments, params.port) as child:
        said = _answer(child, params, observer)
        observer.begin((), timed=False)
        error = json.loads(said).get("error")
        if error is not None:
            same = f"oscar-zoo {shlex.join(arguments[:2])} "  # without --detach in the child
            hint = error["hint"] and error["hint"].replace(same, f"{same}--detach ")
            return Refused(error["code"], error["message"], hint, child.wait())
        return TypeAdapter(ReadyServer).validate_json(said)


@contextlib.contextmanager
def _child(arguments: list[str], port: int) -> Iterator[Child[bytes]]:
    """The process that serves; it ends when the block ends by an exception, Ctrl-C included."""
    # Its error is passed on, so it must be one JSON object and no traceback.
    env = {name: value for name, value in os.environ.items() if name != "OSCAR_ZOO_DEBUG"}
    signals = Signals()
    try:
        with open_private(serve_log(port).with_suffix(".stderr")) as stderr:
            child = children.start(
                children.python("-c", PROGRAM, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                start_new_session=True,
            )
        assert child.stdout is not None
        with child.stdout:
            try:
                signals.deliver()
                yield child
            except BaseException:
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(ENDING_SECONDS)
                except subprocess.TimeoutExpired:
                    child.kill()  # its watchdog ends the engine
                    child.wait()
                raise
    finally:
        signals.restore()


def _answer(child: Child[bytes], params: ServeParams, observer: Observer) -> bytes:
    """The one JSON object that the child prints once it is ready or has failed. Until then the
    observer hears what it does: it checks everything, and then starts the engine, which writes its
    log."""
    assert child.stdout is not None
    port, log, phases = params.port, serve_log(params.port), None
    started, data = time.monotonic(), b""
    while True:
        if phases is None and log.exists():
            phases = PhaseReader(log)
            text = f"Starting a server in the background (log: {log})"
            observer.note(Note("server.detached", text, {"log": str(log)}, kind="step"))
        phase = CHECKING if phases is None else phases.current()
        observer.advance(phase, int(time.monotonic() - started), 0, "s")
        if not select.select([child.stdout], [], [], POLL_SECONDS)[0]:
            continue
        part = os.read(child.stdout.fileno(), 1 << 16)
        data += part
        if not part or data.endswith(b"}\n"):
            with contextlib.suppress(ValueError):
                json.loads(data)
                return data
        if not part:
            words = serve_log(port).with_suffix(".stderr")
            raise ServerFailed(
                f"oscar-zoo serve ended in the background (status {child.wait()}).",
                hint=f"see {words}, or run it without --detach",
            )
