"""The servers that run: one private file in the state folder for each.

A record names the process that supervises a server. The process writes it, and removes it at its
end. A record whose process is gone is removed by whoever reads it. Records of other machines and
containers that share the folder are left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from oscar_zoo import paths
from oscar_zoo.artifact.durable import make_folders, replace_file, storage_errors
from oscar_zoo.engines.sglang.launch import plan
from oscar_zoo.engines.sglang.launch.processes import Process
from oscar_zoo.errors import ServerNotFound, UsageError

State = Literal["starting", "ready"]
KEY, ADMINISTRATION_KEY = ".key", ".administration-key"
"""Ends of the names of the files beside a record."""


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
        state: what it is doing.
    """

    process: Process
    port: int
    url: str
    model: str
    artifact: str
    log: str
    since: str
    state: State

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
            return cls(**(value | {"process": Process(**value["process"])}))
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
        return (datetime.now(UTC) - datetime.fromisoformat(self.since)).total_seconds()


def folder() -> Path:
    """The folder of the records."""
    return paths.state_dir() / "servers"


def running() -> list[ServerRecord]:
    """The records of the servers that run here, sorted by port.

    Records whose process is gone are removed.
    """
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            record = ServerRecord.parse(path.read_bytes())
        except (OSError, ValueError):
            continue  # it is being removed, or another version wrote it
        if record.process.alive:
            found.append(record)
        elif not record.process.elsewhere:
            _forget(path)
    return sorted(found, key=lambda record: record.port)


def find(name: str | None, command: str) -> ServerRecord:
    """The server that `name` means; without a name, the only one.

    Args:
        command: the command that needs it, for the hint.

    Raises:
        ServerNotFound: there is no such server.
        UsageError: there are several.
    """
    all_of_them = running()
    found = [record for record in all_of_them if name is None or record.is_called(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{len(found)} servers run: {_shown(found)}.",
            hint=f"name one by its port: oscar-zoo {command} {found[0].port}",
        )
    if not all_of_them:
        raise ServerNotFound(
            "no server of yours runs here.", hint="start one: oscar-zoo serve NAME"
        )
    raise ServerNotFound(
        f"no server here is called {name}: {_shown(all_of_them)}.", hint="see them: oscar-zoo ps"
    )


@contextlib.contextmanager
def registered(record: ServerRecord) -> Iterator[Entry]:
    """Keep `record` while the block runs.

    Raises:
        StorageError: the folder cannot be written.
    """
    path = _path(record)
    with storage_errors(f"cannot write {path}"):
        make_folders(path.parent, mode=0o700)
        _write(path, record)
    try:
        yield Entry(path, record)
    finally:
        _forget(path)


def key_file(record: ServerRecord) -> Path:
    """Where the key of clients lies, if the server asks for one."""
    return _path(record).with_suffix(KEY)


def administration_key_file(record: ServerRecord) -> Path:
    """Where the key of our own tools lies."""
    return _path(record).with_suffix(ADMINISTRATION_KEY)


@dataclass
class Entry:
    """A record whose changes go to its file."""

    path: Path
    record: ServerRecord

    def change(self, **changes: Any) -> None:
        """Change values of the record; when the disk is full, the file keeps the old ones."""
        self.record = replace(self.record, **changes)
        with contextlib.suppress(OSError):
            _write(self.path, self.record)

    def keep_keys(self, key: str | None, administration_key: str | None) -> None:
        """Keep the keys of the server in private files until it ends.

        Raises:
            StorageError: the folder cannot be written.
        """
        files = {KEY: key, ADMINISTRATION_KEY: administration_key}
        with storage_errors(f"cannot write to {self.path.parent}"):
            for suffix, value in files.items():
                if value is not None:
                    place = self.path.with_suffix(suffix)
                    replace_file(place, value.encode() + b"\n", mode=0o600)


def now() -> str:
    """The current time, in the form of `since`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _path(record: ServerRecord) -> Path:
    return folder() / f"{record.port}-{record.process.pid}.json"


def _forget(path: Path) -> None:
    """Remove a record, and the keys beside it first."""
    for suffix in (KEY, ADMINISTRATION_KEY, path.suffix):
        with contextlib.suppress(OSError):
            path.with_suffix(suffix).unlink(missing_ok=True)


def _write(path: Path, record: ServerRecord) -> None:
    replace_file(path, json.dumps(asdict(record), indent=1).encode() + b"\n", mode=0o600)


def _shown(records: Sequence[ServerRecord]) -> str:
    return ", ".join(f"{record.model} on port {record.port}" for record in records)
