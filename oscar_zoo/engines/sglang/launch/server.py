"""The server as a child process: start it, wait until it is healthy, end it with all it started.

The child gets a session (process group) of its own, so that everything it spawned ends with it:
SIGTERM first, and SIGKILL after a grace period, which is short once only the child is left. SIGTERM
to this process lets the server finish its requests first. If this process dies without a chance to
clean up, the kernel ends the child (PR_SET_PDEATHSIG) and a watchdog ends the rest of its group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from oscar_zoo import children
from oscar_zoo.children import Child
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch import processes, watchdog
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan, client_url
from oscar_zoo.engines.sglang.launch.processes import Signals, in_main_thread
from oscar_zoo.engines.sglang.launch.server_log import (
    KILLED,
    PARSER_SAYS,
    UNKNOWN,
    Cause,
    LogPump,
    cause_in,
    lost_port,
    redacted_log,
)
from oscar_zoo.errors import FlagRefused, PortInUse, ServerFailed

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 15.0
ALONE_SECONDS = 1.0
"""Seconds of the grace period for a child whose workers are gone. SGLang takes their end for a
crash and would sleep for five seconds before it ends itself."""
KILL_SECONDS = 30.0
"""Seconds that the system may take to end killed workers and free what they hold."""
DRAIN_SECONDS = 300.0
"""Seconds that requests may take to finish after SIGTERM; a second signal ends them at once."""
POLL_SECONDS = 0.5
STOPPED = (
    b"oscar-zoo stopped this server. What stands above about processes that crashed with exit code"
    b" -15 is their end by SIGTERM.\n"
)
"""The last line in the log of a server that did not end by itself."""
LAST_WORDS_SECONDS = 2.0
"""Seconds that workers may go on to print when the child has ended."""
READS = "from oscar_zoo.engines.sglang.compat.server_arguments import read; read()"


def check_words(plan: LaunchPlan) -> None:
    """Refuse flags that the parser of an installed SGLang refuses. No server starts."""
    words = plan.argv[plan.argv.index("sglang.launch_server") + 1 :]
    try:
        children.output(children.python("-c", READS, *words), env=plan.env, seconds=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        if getattr(error, "returncode", 0) == 2:
            text = str(error.stderr).rpartition(PARSER_SAYS)[2].strip()
            raise FlagRefused.for_flags(text) from None


class Server:
    """One running child. Use `running()`, which always ends it."""

    def __init__(
        self, process: Child[bytes], plan: LaunchPlan, log: Path, pump: LogPump, signals: Signals
    ) -> None:
        self._process, self._pump, self._signals = process, pump, signals
        self.url, self.log, self._engine = plan.url, log, plan.engine
        self.stopping = False

    @property
    def group(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait_until_healthy(self, timeout: float, tick: Callable[[float], None]) -> None:
        """Wait for the health endpoint to answer, up to `timeout` seconds; `tick` is called at once
        and then about twice a second with the seconds waited so far."""
        started, client = time.monotonic(), ServerClient(client_url(self.url), timeout=5)
        while True:
            waited = time.monotonic() - started
            if self.returncode is not None:
                if self.stopping:
                    return
                raise self.failure("the server ended while starting")
            tick(waited)
            self._check_port()
            if client.healthy():
                return
            if waited > timeout:
                raise ServerFailed(
                    f"the server was not ready after {timeout:.0f} s.", hint=f"log: {self.log}"
                )
            time.sleep(POLL_SECONDS)

    def _check_port(self) -> None:
        port = lost_port(self.log)
        if port is not None:
            raise PortInUse(
                f"port {port} was taken by another process while the server started.",
                hint=f"run it again, or choose another: --port N; log: {self.log}",
            )

    @property
    def status(self) -> str:
        code = self.returncode or 0
        return f"{'killed by ' if code < 0 else ''}{processes.exit_words(code)}"

    def failure(self, what: str) -> ServerFailed:
        """The error for a child that ended. Where the log gives no reason, its exit status is
        told."""
        cause = self.cause()
        if cause.by_parser:
            return FlagRefused.for_flags(cause.text, self.log, self._engine)
        steps = "; ".join(part for part in (cause.hint, f"log: {self.log}") if part)
        how = f" ({self.status})" if cause.text == UNKNOWN else ""
        return ServerFailed(f"{what}{how}: {cause.text}.", hint=steps)

    def cause(self) -> Cause:
        self._pump.join(LAST_WORDS_SECONDS)
        cause = cause_in(self.log)
        killed = cause.text == UNKNOWN and self.returncode == -signal.SIGKILL
        return KILLED if killed else cause

    @contextlib.contextmanager
    def signals_wait(self) -> Iterator[None]:
        """A signal raises when the block has ended well, and not inside of it."""
        self._signals.hold()
        yield
        self._signals.deliver()

    def wait(self, draining: Callable[[], None] = lambda: None) -> int:
        """Block until the child ends, and return its exit status. SIGTERM to this process lets the
        child drain first, unless a second signal comes; `draining` is called before."""
        try:
            return self._process.wait()
        except SystemExit:
            draining()
            self._signals.deliver()
            self.drain(DRAIN_SECONDS)
            self._signals.hold()
            raise

    def drain(self, limit: float) -> bool:
        """Ask the child to finish its requests and end; whether it ended within `limit` seconds.
        Only the child gets SIGTERM: its workers would drop every request with what they compute."""
        self.stopping = True
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        self.stopping = True
        _signal_group(self._process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            self._process.poll()
            if not _group_alive(self._process.pid):
                break
            if processes.in_group(self._process.pid) == {self._process.pid}:
                deadline = min(deadline, time.monotonic() + ALONE_SECONDS)
            time.sleep(0.05)
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + KILL_SECONDS
        while processes.in_group(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)


@contextlib.contextmanager
def running(plan: LaunchPlan, log: Path) -> Iterator[Server]:
    """Start the child of `plan` with its output in `log`, which holds no secret of the plan; the
    child is gone when the block ends, whatever happens inside. SIGTERM and SIGINT to this process
    are passed on as an orderly stop of the child while the block runs. Only the main thread can
    take signals; a server that another thread starts ends with its block, or with the process."""
    signals, stopped = Signals(), False
    try:
        with redacted_log(log, plan.secrets) as (stream, pump):
            with stream:
                server = Server(_start(plan, stream), plan, log, pump, signals)
            with _watchdog(server):
                try:
                    signals.deliver()
                    yield server
                finally:
                    signals.ignore()  # a second Ctrl-C must not leave the child behind
                    stopped = server.stopping or server.returncode is None
                    server.stop()
    finally:
        if stopped:
            _append(log, STOPPED)
        signals.restore()


def _append(log: Path, line: bytes) -> None:
    with contextlib.suppress(OSError):
        number = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(number, "wb") as stream:
            stream.write(line)


def _start(plan: LaunchPlan, stream: BinaryIO) -> Child[bytes]:
    # To the kernel the parent is the thread, which may end before the process does.
    mortal = sys.platform == "linux" and in_main_thread()
    try:
        return children.start(
            list(plan.argv),
            env=plan.env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if mortal else None,
        )
    except OSError as error:
        raise ServerFailed(f"the server could not be started: {error.strerror}.") from error


@contextlib.contextmanager
def _watchdog(server: Server) -> Iterator[None]:
    """A process that ends the server's group if this one is killed before the block ends."""
    command = children.python(str(Path(watchdog.__file__)), str(server.group), isolated=True)
    quiet = subprocess.DEVNULL
    try:
        guard = children.start(
            command,
            stdin=subprocess.PIPE,
            stdout=quiet,
            stderr=quiet,
            env={},
            start_new_session=True,
        )
    except OSError as error:
        server.stop()
        raise ServerFailed(f"the server could not be watched: {error.strerror}.") from error
    assert guard.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(b".")
            guard.stdin.close()
        guard.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _group_alive(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
