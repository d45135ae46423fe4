"""Start `oscar-zoo serve` in a session of its own, so that the server outlives the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oscar_zoo import children
from oscar_zoo.app.serve_checks import check, check_place, find_artifact
from oscar_zoo.app.serve_request import ServeRequest
from oscar_zoo.app.servers import serve_log
from oscar_zoo.children import Child
from oscar_zoo.engines.sglang.launch.flag_refusals import replaced_backends
from oscar_zoo.engines.sglang.launch.phases import PhaseReader
from oscar_zoo.engines.sglang.launch.plan import LOOPBACK
from oscar_zoo.engines.sglang.launch.private_log import open_private
from oscar_zoo.engines.sglang.launch.signals import Signals
from oscar_zoo.errors import ServerFailed
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry.targets import PathTarget

PROGRAM = "from oscar_zoo.cli.main import main; main()"
POLL_SECONDS = 0.5
CHECKING = "checking model and artifact"
"""What is said until the engine starts: artifact and weights may be fetched then, too."""
ENDING_SECONDS = 60.0
"""Seconds that a server that is no longer wanted may take to end."""


def start_detached(
    request: ServeRequest, observer: Observer = SILENT
) -> tuple[dict[str, Any], int | None]:
    """Start a server in the background and wait until it is ready.

    An artifact that may have to be computed is found by this process, which tells the observer of
    it as `serve` does; only the server goes into the background.
    """
    host, port = request.expose or LOOPBACK, request.port
    check_place(request, host)
    log = serve_log(port)
    log.unlink(missing_ok=True)  # its phases are shown, and it tells that the engine was started
    for warning in replaced_backends(request.flags):  # the child's words are in a file
        observer.note(Note("server.environment", warning))
    by_name = not isinstance(request.target, PathTarget)
    may_compute = by_name and (request.compute or request.ask)
    if may_compute:
        find_artifact(request, check(request, observer), observer)
        observer.begin((), timed=False)
    # a hub that was named does not have what was computed; the zoo of this user does
    compute = request.compute or may_compute
    arguments = request.arguments(detach=None, json=True, port=port, compute=compute)
    with _child(arguments, port) as child:
        said = _answer(child, port, observer)
        observer.begin((), timed=False)
        return said, child.wait() if "error" in said else None


def own_words(port: int) -> Path:
    """What `oscar-zoo serve` itself prints in the background; the engine has its own log."""
    return serve_log(port).with_suffix(".stderr")


@contextlib.contextmanager
def _child(arguments: list[str], port: int) -> Iterator[Child[bytes]]:
    """The process that serves; it ends when the block ends by an exception, Ctrl-C included."""
    command = children.python("-c", PROGRAM, *arguments)
    # Its error is passed on, so it must be one JSON object and no traceback.
    env = {name: value for name, value in os.environ.items() if name != "OSCAR_ZOO_DEBUG"}
    signals = Signals()
    try:
        with open_private(own_words(port)) as stderr:
            child = children.start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                start_new_session=True,
            )
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
            assert child.stdout is not None
            child.stdout.close()
    finally:
        signals.restore()


class _News:
    """What the child does: it checks everything, and then starts the engine, which writes `log`."""

    def __init__(self, log: Path, observer: Observer) -> None:
        self._log, self._observer = log, observer
        self._phases: PhaseReader | None = None

    def tell(self, seconds: int) -> None:
        """Tell the observer, `seconds` after the start."""
        if self._phases is None and self._log.exists():
            self._phases = PhaseReader(self._log)
            text = f"Starting a server in the background (log: {self._log})"
            facts = {"log": str(self._log)}
            self._observer.note(Note("server.detached", text, facts, kind="step"))
        phase = CHECKING if self._phases is None else self._phases.current()
        self._observer.advance(phase, seconds, 0, "s")


def _answer(child: Child[bytes], port: int, observer: Observer) -> dict[str, Any]:
    """The one JSON object that the child prints once it is ready or has failed."""
    assert child.stdout is not None
    started, data, news = time.monotonic(), b"", _News(serve_log(port), observer)
    while True:
        news.tell(int(time.monotonic() - started))
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
