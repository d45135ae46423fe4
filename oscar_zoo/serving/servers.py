"""The servers that run on this machine: see them, read the log of one, stop one."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import Field

from oscar_zoo.artifact.outcome import says
from oscar_zoo.engines.sglang.front.middleware import PATH
from oscar_zoo.engines.sglang.launch.plan import check_port_free, next_free_port
from oscar_zoo.engines.sglang.launch.server import DRAIN_SECONDS, GRACE_SECONDS
from oscar_zoo.errors import PortInUse, ServerFailed, ServerNotFound, UsageError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.paths import logs_dir
from oscar_zoo.serving import records
from oscar_zoo.serving.params import ON_A_TERMINAL, LogsParams, StopParams
from oscar_zoo.serving.records import End, Port, ServerRecord, Time

POLL_SECONDS, PS_SECONDS = 0.5, 2.0
LONGEST_STOP = DRAIN_SECONDS + 3 * GRACE_SECONDS
"""Seconds after which a server should be gone: its requests drain, then it has a grace period."""


@dataclass(frozen=True, kw_only=True)
class EndedServer(End):
    port: Port
    model_id: Annotated[str, says("The id that requests named.")]
    artifact: Annotated[str, says("The artifact that was served.")]
    since: Annotated[Time, says("When it was started, in UTC.")]
    log: Annotated[str, says("What the engine printed.")]

    @classmethod
    def of(cls, record: ServerRecord) -> EndedServer:
        known = {name: getattr(record, name) for name in ("port", "artifact", "since", "log")}
        return cls(**vars(record.end), **known, model_id=record.model)


@dataclass(frozen=True)
class PsReport:
    """What oscar-zoo ps prints."""

    servers: tuple[ServerRecord, ...]
    ended: Annotated[tuple[EndedServer, ...], says("For three days, unless stopped.")]
    schema: Literal["oscar-zoo.ps/1"] = "oscar-zoo.ps/1"


@dataclass(frozen=True)
class StoppedServer:
    port: Port
    model_id: Annotated[str, says("The id that requests named.")]
    pid: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class StopReport:
    """What oscar-zoo stop prints when the server is gone, or had ended before."""

    stopped: Annotated[StoppedServer | None, says("Null where it had ended by itself.")]
    forgotten: Annotated[tuple[EndedServer, ...], says("Those that had ended before.")] = ()
    schema: Literal["oscar-zoo.stop/1"] = "oscar-zoo.stop/1"


@dataclass(frozen=True)
class LogsReport:
    """What oscar-zoo logs prints; `lines` come while the log is read."""

    log: Annotated[str, says("Its file.")]
    ended: Annotated[EndedServer | None, says("The server, where it ended by itself; else null.")]
    lines: Annotated[Iterable[str], says("Its end, or all of it.")]
    schema: Literal["oscar-zoo.logs/1"] = "oscar-zoo.logs/1"


def ps(_: object = None) -> PsReport:
    shown = tuple(map(with_canary, records.running()))
    return PsReport(shown, tuple(map(EndedServer.of, records.ended())))


def with_canary(record: ServerRecord) -> ServerRecord:
    try:
        told = records.client_of(record.url.removesuffix("/v1"), timeout=PS_SECONDS).get(PATH)
        outside = told["canary"]["outside"]
    except (ServerFailed, KeyError, TypeError):
        return record
    return replace(record, canary="out of band" if outside else "in band")


def stop(params: StopParams, observer: Observer = SILENT) -> StopReport:
    """Stop a server and wait until it is gone. Where none runs that is meant, those that had ended
    by themselves are told and forgotten."""
    try:
        record = records.find(params.name, "stop")
    except ServerNotFound:
        gone = records.ended(params.name)
        if not gone:
            raise
        for one in gone:
            records.forget(one)
        return StopReport(None, tuple(map(EndedServer.of, gone)))
    ready = record.state == "ready"
    record.process.send(signal.SIGINT if params.now and ready else signal.SIGTERM)
    what = (
        f"waiting for the requests of {record.model} to finish"
        if ready and not params.now
        else f"stopping {record.model}"
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
    records.forget(record)  # a process that was killed left it
    return StopReport(StoppedServer(record.port, record.model, record.process.pid))


def logs(params: LogsParams, observer: Observer = SILENT) -> LogsReport:
    number = ON_A_TERMINAL if params.lines is None and sys.stdout.isatty() else None
    if params.lines not in (None, "all"):
        number = int(params.lines) if str(params.lines).isdecimal() else 0
        if number < 1:
            raise UsageError(
                f"--lines {params.lines!r} is no number of lines.",
                hint="a number from 1 on, or all",
            )
    log, record = log_of(params.name)
    ended = EndedServer.of(record) if record is not None and record.end is not None else None
    alive = (lambda: record.process.alive) if params.follow and record is not None else None
    return LogsReport(str(log), ended, read_log(log, lines=number, follow=alive))


def serve_log(port: int) -> Path:
    from oscar_zoo.engines.sglang.launch.starting import log_file  # imports numpy

    return log_file(f"serve-{port}")


def log_of(name: str | None) -> tuple[Path, ServerRecord | None]:
    """The log of a running server, with its record; where there is none, that of the server that
    ended last; or the log of the last server on a port."""
    try:
        record = records.find(name, "logs")
    except ServerNotFound as error:
        if (last := records.last_ended(name)) is not None:
            return Path(last.log), last
        log = logs_dir() / f"serve-{name}.log"  # which is not made
        if name is not None and name.isdecimal() and log.is_file():
            return log, None
        if name is None and (port := _newest_log()) is not None:
            error.advise(f"the log of the last one: oscar-zoo logs {port}")
        raise
    return Path(record.log), record


def read_log(
    log: Path, *, lines: int | None, follow: Callable[[], bool] | None = None
) -> Iterator[str]:
    """The last `lines` of `log`, or all, and every line that is written later while `follow` says
    that more may come; `None` reads the log once."""
    try:
        with log.open("rb") as stream:
            found = (part for one in stream for part in str(one, "utf-8", "replace").splitlines())
            yield from found if lines is None else deque(found, maxlen=lines)
            if follow is not None:
                yield from _new_lines(stream, follow)
    except FileNotFoundError:
        raise ServerNotFound(f"no log at {log}.", hint="see what runs: oscar-zoo ps") from None


def check_port(host: str, port: int, again: Callable[[str], str]) -> None:
    """Refuse a port that is taken; `again` is the command with another one."""
    ours = {record.port: record for record in records.running()}

    def other() -> str:
        return again(str(next_free_port(host, port, avoid=ours.keys()) or "PORT"))

    if port in ours:
        raise PortInUse(
            f"port {port} is taken: {ours[port].model} is served there.",
            hint=f"choose another: {other()} (or end that one: oscar-zoo stop {port})",
        )
    check_port_free(host, port, again=other)


def _newest_log() -> str | None:
    logs = logs_dir().glob("serve-*.log")
    ports = {path.stem.removeprefix("serve-"): path.stat().st_mtime for path in logs}
    return max(filter(str.isdecimal, ports), key=ports.__getitem__, default=None)


def _new_lines(stream: IO[bytes], goes_on: Callable[[], bool]) -> Iterator[str]:
    rest = b""
    while True:
        last = not goes_on()  # asked before the read, so that the last lines are read, too
        *whole, rest = (rest + stream.read()).split(b"\n")
        yield from (str(line, "utf-8", "replace") for line in whole)
        if last:
            return
        time.sleep(POLL_SECONDS)
