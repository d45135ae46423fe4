"""What can be done with the servers that run on this machine: find one's log, read it, stop one."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from oscar_zoo.app import server_records
from oscar_zoo.app.server_record import ServerRecord
from oscar_zoo.engines.sglang.launch.own_server import log_file
from oscar_zoo.engines.sglang.launch.ports import check_port_free, next_free_port
from oscar_zoo.engines.sglang.launch.server import (
    DRAIN_SECONDS,
    GRACE_SECONDS,
)
from oscar_zoo.errors import PortInUse, ServerFailed, ServerNotFound
from oscar_zoo.observer import SILENT, Observer

POLL_SECONDS = 0.5
LONGEST_STOP = DRAIN_SECONDS + 3 * GRACE_SECONDS
"""Seconds after which a server should be gone: its requests drain, then it has a grace period."""


def stop(
    name: str | None, *, now: bool = False, observer: Observer = SILENT
) -> ServerRecord | list[ServerRecord]:
    """Stop a server and wait until it is gone.

    Args:
        name: port, model or artifact of the server; `None` for the only one.

    Returns:
        The server that was stopped. Where none runs that `name` means, the list of those that it
        means and that had ended by themselves; they are forgotten.
    """
    try:
        record = server_records.find(name, "stop")
    except ServerNotFound:
        gone = sorted(server_records.ended_called(name), key=lambda one: one.port)
        if not gone:
            raise
        for one in gone:
            server_records.forget(one)
        return gone
    at_once = now or record.state != "ready"
    record.process.send(signal.SIGINT if now and record.state == "ready" else signal.SIGTERM)
    what = (
        f"stopping {record.model}"
        if at_once
        else f"waiting for the requests of {record.model} to finish"
    )
    started = time.monotonic()
    while not record.process.wait(POLL_SECONDS):
        waited = time.monotonic() - started
        observer.advance(what, int(waited), 0, "s")
        if waited > LONGEST_STOP:
            raise ServerFailed(
                f"{record.model} on port {record.port} is still running after {waited:.0f} s.",
                hint=f"end its requests: oscar-zoo stop {record.port} --now",
            )
    server_records.forget(record)  # a process that was killed left it
    return record


def serve_log(port: int) -> Path:
    """The log of the server on `port`."""
    return log_file(f"serve-{port}")


def log_of(name: str | None) -> tuple[Path, ServerRecord | None]:
    """The log of a running server, with its record; where there is none, that of the server that
    ended last; or the log of the last server on a port.
    """
    try:
        record = server_records.find(name, "logs")
    except ServerNotFound as error:
        gone = server_records.ended_called(name)
        if gone:
            return Path(gone[0].log), gone[0]
        if name is not None and name.isdecimal() and serve_log(int(name)).is_file():
            return serve_log(int(name)), None
        port = _newest_log() if name is None else None
        if port is not None:
            error.advise(f"the log of the last one: oscar-zoo logs {port}")
        raise
    return Path(record.log), record


def read_log(
    log: Path, *, lines: int | None, follow: Callable[[], bool] | None = None
) -> Iterator[str]:
    """The last lines of `log`, and with `follow` every line that is written later.

    Args:
        lines: number of lines of the end; `None` for all.
        follow: whether more may come; asked again and again. `None` reads the log once.
    """
    try:
        with log.open("rb") as stream:
            found = (part for line in stream for part in _text(line).splitlines())
            yield from found if lines is None else deque(found, maxlen=lines)
            if follow is not None:
                yield from _new_lines(stream, follow)
    except FileNotFoundError:
        raise ServerNotFound(f"no log at {log}.", hint="see what runs: oscar-zoo ps") from None


def check_port(host: str, port: int, again: Callable[[str], str]) -> None:
    """Refuse a port that is taken."""
    ours = {record.port: record for record in server_records.running()}

    def other() -> str:
        return again(str(next_free_port(host, port, avoid=ours.keys()) or "PORT"))

    if port in ours:
        raise PortInUse(
            f"port {port} is taken: {ours[port].model} is served there.",
            hint=f"choose another: {other()} (or end that one: oscar-zoo stop {port})",
        )
    check_port_free(host, port, again=other)


def _newest_log() -> int | None:
    """The port of the log that was written last, or `None` when there is no log."""
    logs = [
        path
        for path in serve_log(0).parent.glob("serve-*.log")
        if path.stem.removeprefix("serve-").isdecimal()
    ]
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else int(newest.stem.removeprefix("serve-"))


def _new_lines(stream: IO[bytes], goes_on: Callable[[], bool]) -> Iterator[str]:
    rest = b""
    while True:
        last = not goes_on()  # asked before the read, so that the last lines are read, too
        *whole, rest = (rest + stream.read()).split(b"\n")
        for line in whole:
            yield _text(line)
        if last:
            return
        time.sleep(POLL_SECONDS)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
