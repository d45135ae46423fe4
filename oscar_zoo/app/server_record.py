"""What is known of one server of ours: who supervises it, what it serves, and how it ended."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from oscar_zoo.engines.sglang.launch import plan
from oscar_zoo.engines.sglang.launch.processes import Process

State = Literal["starting", "ready"]


@dataclass(frozen=True)
class End:
    """How a server ended that nobody stopped.

    Attributes:
        cause: why, in one line without a full stop.
        noticed: when it was seen that it had ended, UTC.
        at: when it ended, UTC; `None` when nobody was there to see it.
        exit_status: of the engine's process, negative for a signal; `None` when nobody knows it.
        last_sign: where nobody saw its end, when it wrote to its log for the last time, or was
            started, UTC; else `None`.
    """

    cause: str
    noticed: str
    at: str | None = None
    exit_status: int | None = None
    last_sign: str | None = None

    @property
    def time(self) -> str:
        """When it ended, as far as that is known, to stand behind "ended"."""
        if self.at is not None:
            return f"at {_shown(self.at)} UTC"
        if self.last_sign is not None:
            return f"between {_shown(self.last_sign)} and {_shown(self.noticed)} UTC"
        return f"before {_shown(self.noticed)} UTC"

    @property
    def days(self) -> float:
        """Days since it was noticed."""
        return _seconds_since(self.noticed) / 86400


@dataclass(frozen=True)
class ServerRecord:
    """One server.

    Attributes:
        process: the process that supervises the server.
        port: the port that it listens on.
        url: the URL of its API, `http://HOST:PORT/v1`.
        model: the id that requests name.
        artifact: the label of the served artifact.
        log: the log file of the engine.
        since: when it was started, UTC.
        state: what it is doing, or did last.
        end: how it ended; `None` while it runs.
    """

    process: Process
    port: int
    url: str
    model: str
    artifact: str
    log: str
    since: str
    state: State
    end: End | None = None

    @classmethod
    def of_this_process(
        cls, *, host: str, port: int, model: str, artifact: str, log: Path
    ) -> ServerRecord:
        """The record of a server that this process starts now; see the attributes."""
        me = Process.of(os.getpid())
        assert me is not None, "this process runs"
        return cls(
            process=me,
            port=port,
            url=f"{plan.url(host, port)}/v1",
            model=model,
            artifact=artifact,
            log=str(log),
            since=now(),
            state="starting",
        )

    @classmethod
    def parse(cls, data: bytes) -> ServerRecord:
        """Read a record from the bytes of its file; raises `ValueError` when they hold none."""
        try:
            value = dict(json.loads(data))
            end = value.get("end")
            parts = {"process": Process(**value["process"]), "end": end and End(**end)}
            return cls(**(value | parts))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a record of a server: {error}") from None

    def is_called(self, name: str) -> bool:
        """Whether `name` means this server: its port, its model or its artifact, without case."""
        name = name.casefold()
        names = {
            self.model,
            self.model.rpartition("/")[2],
            self.artifact,
            self.artifact.partition(":")[0],
        }
        return name in {str(self.port), *(one.casefold() for one in names)}

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return _seconds_since(self.since)

    @property
    def last_sign(self) -> str:
        """When it wrote to its log for the last time, or was started, if it has no later log."""
        try:
            written = datetime.fromtimestamp(Path(self.log).stat().st_mtime, UTC)
        except OSError:
            return self.since
        return max(written, datetime.fromisoformat(self.since)).isoformat(timespec="seconds")


def now() -> str:
    """The current time, in the form of `since`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _shown(time: str) -> str:
    return time[:19].replace("T", " ")


def _seconds_since(time: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()
