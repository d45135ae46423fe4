"""The server as a child process: start, wait until healthy, pass signals on, leave nothing behind.

The child gets a session (process group) of its own, so that everything it spawned ends with it:
SIGTERM first, SIGKILL after a grace period. SIGTERM while it serves lets it finish its requests
first. If this process dies without a chance to clean up, the kernel ends the child
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from oscar_zoo.engines.sglang.launch import watchdog
from oscar_zoo.engines.sglang.launch.plan import LOOPBACK, LaunchPlan
from oscar_zoo.errors import OscarZooError, PortInUse, ServerFailed, UsageError

PR_SET_PDEATHSIG = 1
WILDCARDS = {"0.0.0.0": LOOPBACK, "[::]": "[::1]"}
"""Addresses that mean every address of a machine, and one that a client on it can ask."""
GRACE_SECONDS = 15.0
DRAIN_SECONDS = 300.0
"""How long requests may take to end after SIGTERM; a second signal ends them at once."""
POLL_SECONDS = 0.5
TAIL_BYTES = 1 << 18
NAMES_ERROR = re.compile(r"[\w.]*(Error|Exception|Mismatch): |[\w .-]{0,60}: error: |error: ")
"""Lines of a log that name an error: the end of a traceback, and what an argument parser says."""
OURS = re.compile(rf"(?:{re.escape(OscarZooError.__module__)}\.\w+|error): (?P<message>.+)")
"""Those that this library wrote: at the end of a traceback, and instead of one (`plain_errors`)."""
FOLLOWS = re.compile(
    r"(EOFError|BrokenPipeError|Connection\w*Error)\b|RuntimeError: (Rank \d+|Initialization"
    r" failed)"
)
"""What other processes say because one of them failed."""
WORDLESS = re.compile(r"[\w.]*(Error|Exception)")
"""The end of a traceback that gives no reason, such as that of a bare `assert`."""
FRAME = re.compile(
    r'File "(?:.*/site-packages/)?(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)'
)
HINT = "hint: "


def _frames(lines: Sequence[str]) -> Iterator[str]:
    """Per line of a log, where the last frame of a traceback above it is and what stands there;
    `""` without one."""
    frame, number = "", -1
    for place, line in enumerate(lines):
        yield frame
        found = FRAME.fullmatch(line)
        if found is not None:
            frame, number = "{file}:{line} in {function}".format_map(found.groupdict()), place
        elif place == number + 1 and frame:
            frame += f": {line}"


def _reason(line: str, frame: str) -> str:
    """A line of a log; an error without words gets the place where it was raised."""
    return f"{line} at {frame}" if frame and WORDLESS.fullmatch(line) else line


def check_port_free(host: str, port: int, *, again: Callable[[], str] | None = None) -> None:
    """Refuse early when something listens on `host:port`.

    Args:
        again: the same command line with another port, for the hint.

    Raises:
        PortInUse: with the next free port as hint.
        UsageError: a port that needs privileges, or an address that is not this machine's.
    """
    refusal = _bind_error(host, port)
    if refusal is None:
        return
    if refusal.errno == errno.EADDRINUSE:
        other = again() if again else f"--port {next_free_port(host, port) or 'PORT'}"
        raise PortInUse(
            f"port {port} on {host} is taken by another process.", hint=f"choose another: {other}"
        )
    if refusal.errno in (errno.EACCES, errno.EPERM):
        raise UsageError(
            f"you may not listen on port {port}.",
            hint="choose one above 1023, for example --port 30000",
        )
    raise UsageError(
        f"{host} is not an address of this machine.",
        hint="see them: ip address; all: --expose 0.0.0.0",
    )


def next_free_port(host: str, port: int, *, avoid: Collection[int] = ()) -> int | None:
    """The first port above `port` that nobody listens on, `avoid` left out; `None` where a hundred
    are taken."""
    near = (other for other in range(port + 1, min(port + 100, 65536)) if other not in avoid)
    return next((other for other in near if _bind_error(host, other) is None), None)


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def client_url(url: str) -> str:
    """Where a client on this machine reaches a server that listens at `url`."""
    for wildcard, address in WILDCARDS.items():
        url = url.replace(f"://{wildcard}:", f"://{address}:")
    return url


def _bind_error(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:  # gaierror of an unknown name included
            return error
    return None


class Server:
    """One running child. Use `running()`, which always ends it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self._process = process
        self.url = url
        self.log = log
        self.stopping = False

    @property
    def group(self) -> int:
        """Process group of the child and of everything it starts."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or `None` while it runs."""
        return self._process.poll()

    def wait_until_healthy(self, timeout: float, tick: Callable[[float], None]) -> None:
        """Wait for the health endpoint to answer.

        Args:
            timeout: seconds.
            tick: called about twice a second with the seconds waited so far.

        Raises:
            ServerFailed: the child died (with the cause from its log), or time ran out.
        """
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            if self.returncode is not None:
                if self.stopping:
                    return
                raise self.failure("the server ended while starting")
            if self.healthy():
                return
            if waited > timeout:
                raise ServerFailed(
                    f"the server was not ready after {timeout:.0f} s.", hint=f"log: {self.log}"
                )
            tick(waited)
            time.sleep(POLL_SECONDS)

    def healthy(self) -> bool:
        """Whether `GET /health` answers 200 now."""
        address = urlsplit(client_url(self.url))
        host = address.hostname or LOOPBACK
        connection = http.client.HTTPConnection(host, address.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    @property
    def status(self) -> str:
        """How the child ended, in words."""
        code = self.returncode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"

    def failure(self, what: str) -> ServerFailed:
        """The error for a child that ended: `what` happened, how it ended, and why, out of its
        log."""
        text, hint = self.cause()
        steps = "; ".join(part for part in (hint, f"log: {self.log}") if part)
        return ServerFailed(f"{what} ({self.status}): {text}.", hint=steps)

    def cause(self) -> tuple[str, str | None]:
        """Why the child ended, by its log: one line without a full stop, and the next step where
        that is known.

        A refusal of ours counts before anything that was said after it, which only follows from it.
        """
        with self.log.open("rb") as stream:
            stream.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            lines = [
                line.strip()
                for line in stream.read().decode("utf-8", "replace").splitlines()
                if line.strip()
            ]
        for place in reversed(range(len(lines))):
            own = OURS.fullmatch(lines[place])
            if own is not None:
                after = lines[place + 1] if place + 1 < len(lines) else ""
                hint = after.removeprefix(HINT) if after.startswith(HINT) else None
                return own["message"][:600].rstrip("."), hint
        seen = zip(lines, _frames(lines), strict=True)
        errors = [
            _reason(*one) for one in seen if NAMES_ERROR.match(one[0]) or WORDLESS.fullmatch(one[0])
        ]
        roots = [line for line in errors if not FOLLOWS.match(line)] or errors
        return (roots[-1][:400].rstrip(".") if roots else "no error in its log"), None

    def wait(self) -> int:
        """Block until the child ends; its exit status. SIGTERM to this process lets it drain before
        it ends."""
        try:
            return self._process.wait()
        except SystemExit:
            self.drain(DRAIN_SECONDS)
            raise

    def drain(self, limit: float) -> bool:
        """Ask the child to finish its requests and end; whether it ended within `limit` seconds.

        Only the child gets SIGTERM: its workers would drop what they compute, and every request
        with it.
        """
        self.stopping = True
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """End the child and everything it started; returns when the whole group is gone."""
        self.stopping = True
        _signal_group(self._process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            self._process.poll()
            if not _group_alive(self._process.pid):
                break
            time.sleep(0.05)
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def running(plan: LaunchPlan, log: Path) -> Iterator[Server]:
    """Start the child of `plan` with its output in `log`; it is gone when the block ends, whatever
    happens inside.

    SIGTERM and SIGINT to this process are passed on as an orderly stop of the child while the block
    runs. Only the main thread can take signals; a server that another thread starts ends with its
    block, or with the process.

    Raises:
        ServerFailed: the program could not be started.
    """
    signals = _Signals()
    try:
        with log.open("wb") as stream:
            server = Server(_start(plan, stream), plan.url, log)
        with _watchdog(server):
            try:
                signals.deliver()
                yield server
            finally:
                signals.ignore()  # a second Ctrl-C must not leave the child behind
                server.stop()
    finally:
        signals.restore()


class _Signals:
    """SIGINT and SIGTERM as exceptions, but never between starting the child and being able to stop
    it."""

    def __init__(self) -> None:
        self._pending: int | None = None
        self._deliver = False
        names = (signal.SIGTERM, signal.SIGINT) if _in_main_thread() else ()
        self._previous = {name: signal.signal(name, self._handle) for name in names}

    def _handle(self, number: int, frame: object) -> None:
        self._pending = number
        if self._deliver:
            self._raise()

    def _raise(self) -> None:
        number, self._pending = self._pending, None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + int(number or 0))

    def deliver(self) -> None:
        """From here on a signal raises; one that came earlier raises now."""
        self._deliver = True
        if self._pending is not None:
            self._raise()

    def ignore(self) -> None:
        """Signals have no effect until `restore`."""
        for name in self._previous:
            signal.signal(name, signal.SIG_IGN)

    def restore(self) -> None:
        """The handlers of before."""
        for name, handler in self._previous.items():
            signal.signal(name, handler)


def _start(plan: LaunchPlan, stream: BinaryIO) -> subprocess.Popen[bytes]:
    # To the kernel the parent is the thread, which may end before the process does.
    mortal = sys.platform == "linux" and _in_main_thread()
    try:
        return subprocess.Popen(
            plan.argv,
            env=dict(plan.env),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if mortal else None,  # noqa: PLW1509 (no threads of ours)
        )
    except OSError as error:
        raise ServerFailed(f"the server could not be started: {error.strerror}.") from error


@contextlib.contextmanager
def _watchdog(server: Server) -> Iterator[None]:
    """A process that ends the server's group if this one is killed before the block ends."""
    command = [sys.executable, "-I", str(Path(watchdog.__file__)), str(server.group)]
    quiet = subprocess.DEVNULL
    try:
        guard = subprocess.Popen(
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


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


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
