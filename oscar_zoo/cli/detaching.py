"""`serve --detach`: the server stays when the terminal is closed; this process waits until it is
ready."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oscar_zoo.app.servers import check_port, serve_log
from oscar_zoo.cli.choosing import ServeRequest
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.ready import print_ready
from oscar_zoo.cli.serve_command import arguments, command_line
from oscar_zoo.cli.starting import phases_of
from oscar_zoo.engines.sglang.launch.plan import LOOPBACK
from oscar_zoo.errors import ServerFailed

PROGRAM = "from oscar_zoo.cli.main import main; main()"
POLL_SECONDS = 0.5
ENDING_SECONDS = 60.0
"""How long a server that is no longer wanted may take to end."""


def serve_detached(request: ServeRequest) -> int:
    """Start `serve` in a session of its own and wait until it is ready; the exit code.

    Raises:
        PortInUse, UsageError: as `serving.check_port`.
        ServerFailed: it ended and said nothing.
    """
    check_port(
        request.expose or LOOPBACK,
        request.port,
        lambda port: command_line(request, port=port),
    )
    log = serve_log(request.port)
    log.unlink(missing_ok=True)  # of an earlier server, whose phases would be shown
    terminal.note(f"Starting a server in the background (log: {log})", quiet=request.silent)
    with _child(request) as child, phases_of(log, enabled=not request.silent) as tick:
        said = _answer(child, request.port, tick)
    if "error" in said:
        error = said["error"]
        terminal.print_error(
            error["code"], error["message"], error["hint"], as_json=request.as_json
        )
        return child.wait()
    if request.as_json:
        terminal.emit_json(said)
    else:
        print_ready(said, stop=f"oscar-zoo stop {request.port}")
    return 0


@contextlib.contextmanager
def _child(request: ServeRequest) -> Iterator[subprocess.Popen[bytes]]:
    """The process that serves; it ends when the block ends by an exception, Ctrl-C included."""
    command = [sys.executable, "-P", "-c", PROGRAM]
    command += arguments(request, detach=None, quiet=None, json=True)
    env = {
        name: value for name, value in os.environ.items() if name != "OSCAR_ZOO_DEBUG"
    }  # its error is passed on
    with own_words(request.port).open("wb") as stderr:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
            start_new_session=True,
        )
    try:
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
        assert child.stdout is not None
        child.stdout.close()


def own_words(port: int) -> Path:
    """What `serve` itself says in the background; the engine has its own log."""
    return serve_log(port).with_suffix(".stderr")


def _answer(
    child: subprocess.Popen[bytes], port: int, tick: Callable[[float], None]
) -> dict[str, Any]:
    """The one JSON object that the child prints, once it is ready or has failed."""
    assert child.stdout is not None
    started, data = time.monotonic(), b""
    while True:
        tick(time.monotonic() - started)
        if not select.select([child.stdout], [], [], POLL_SECONDS)[0]:
            continue
        part = os.read(child.stdout.fileno(), 1 << 16)
        data += part
        if not part or data.endswith(b"}\n"):
            with contextlib.suppress(ValueError):
                return dict(json.loads(data))
        if not part:
            status = child.wait()
            hint = f"see {own_words(port)}, or run it without --detach"
            raise ServerFailed(
                f"oscar-zoo serve ended in the background (status {status}).", hint=hint
            )
