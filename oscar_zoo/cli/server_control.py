"""`ps`, `stop` and `logs`: what can be done with servers that run."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from oscar_zoo.cli import server_records
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.server_records import ServerRecord
from oscar_zoo.cli.serving import log_file
from oscar_zoo.cli.starting import telling
from oscar_zoo.engines.sglang.launch.server import DRAIN_SECONDS, GRACE_SECONDS
from oscar_zoo.errors import ServerFailed, ServerNotFound

POLL_SECONDS = 0.5
LONGEST_STOP = DRAIN_SECONDS + 3 * GRACE_SECONDS
"""Seconds: requests drain, then the engine has its grace period."""
TAIL_BYTES = 1 << 20


def facts(record: ServerRecord) -> dict[str, Any]:
    """One server for `--json`."""
    told = {
        "port": record.port,
        "model_id": record.model,
        "artifact": record.artifact,
        "url": record.url,
    }
    told |= {"state": record.state, "pid": record.process.pid, "since": record.since}
    return told | {"seconds": round(record.seconds), "log": record.log}


def stop(name: str | None, *, now: bool, quiet: bool) -> ServerRecord:
    """Stop a server and wait until it is gone: requests that run may finish, unless `now`.

    Raises:
        ServerNotFound, UsageError: `name` means none, or several.
        ServerFailed: it does not end.
    """
    record = server_records.find(name, "stop")
    drains = record.state == "ready" and not now
    record.process.send(signal.SIGINT if now and record.state == "ready" else signal.SIGTERM)
    what = (
        f"waiting for the requests of {record.model} to finish"
        if drains
        else f"stopping {record.model}"
    )
    started = time.monotonic()
    with telling(lambda: what, enabled=not quiet) as tick:
        while not record.process.wait(POLL_SECONDS):
            waited = time.monotonic() - started
            tick(waited)
            if waited > LONGEST_STOP:
                raise ServerFailed(
                    f"{record.model} on port {record.port} is still running after {waited:.0f} s.",
                    hint=f"end its requests: oscar-zoo stop {record.port} --now",
                )
    server_records.running()  # removes what it left
    return record


def log_of(name: str | None) -> tuple[Path, ServerRecord | None]:
    """The log of a server that runs, or of the last one on a port.

    Raises:
        ServerNotFound, UsageError: there is none, or several.
    """
    try:
        record = server_records.find(name, "logs")
    except ServerNotFound as error:
        if name is not None and name.isdecimal() and log_file(int(name)).is_file():
            return log_file(int(name)), None
        port = newest_log() if name is None else None
        if port is not None:
            error.hint = f"the log of the last one: oscar-zoo logs {port}"
        raise
    return Path(record.log), record


def newest_log() -> int | None:
    """The port of the log that was written last, or `None` where there is none."""
    logs = [
        path
        for path in log_file(0).parent.glob("serve-*.log")
        if path.stem.removeprefix("serve-").isdecimal()
    ]
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else int(newest.stem.removeprefix("serve-"))


def show_log(log: Path, *, lines: int, follow: Callable[[], bool] | None) -> None:
    """Write the end of `log` to stdout, without control characters.

    Args:
        lines: how many.
        follow: whether to wait for more; `None` for no.

    Raises:
        ServerNotFound: the log is gone.
    """
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
            for line in stream.read().decode("utf-8", "replace").splitlines()[-lines:]:
                sys.stdout.write(terminal.printable(line) + "\n")
            sys.stdout.flush()
            if follow is not None:
                _follow(stream, follow)
    except FileNotFoundError:
        raise ServerNotFound(f"no log at {log}.", hint="see what runs: oscar-zoo ps") from None


def _follow(stream: IO[bytes], goes_on: Callable[[], bool]) -> None:
    rest = b""
    while True:
        last = not goes_on()  # asked first, so that what is written before the end is shown
        *whole, rest = (rest + stream.read()).split(b"\n")
        for line in whole:
            sys.stdout.write(terminal.printable(line.decode("utf-8", "replace")) + "\n")
        sys.stdout.flush()
        if last:
            return
        time.sleep(POLL_SECONDS)
