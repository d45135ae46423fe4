"""The servers that run, and those that ended by themselves: one private file in the state folder
for each, and their keys beside it.

A record names the process that supervises a server. The process writes it. It removes it when it
stops the server, and writes the cause into it when the server ended by itself. Into a record whose
process is gone the cause is written by whoever reads it. A record of a server that ended goes when
another one starts on its port, when `stop` names it, and after three days. Records of other
machines and containers that share the folder are left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, computed_field

from oscar_zoo import paths
from oscar_zoo.artifact.durable import make_folders, replace_file, storage_errors
from oscar_zoo.artifact.outcome import HIDDEN, says
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.front.access import WILDCARDS, is_loopback
from oscar_zoo.engines.sglang.launch import plan
from oscar_zoo.engines.sglang.launch.processes import Process, exit_words
from oscar_zoo.errors import PathNotFound, ServerNotFound, UsageError
from oscar_zoo.serving.params import Engine

State = Literal["starting", "ready"]
KEY, ADMINISTRATION_KEY = ".key", ".administration-key"
"""Ends of the names of the files beside a record."""
KEPT_SECONDS = 3 * 86400
"""Seconds for which it is told that a server ended, so that Monday tells of Friday."""
SECONDS = 600.0
"""Seconds that one answer may take by default."""
MADE = "oscar-zoo-"
"""Beginning of a key that we made, by which people recognise it."""


Port = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


@dataclass(frozen=True)
class End:
    """How a server ended that nobody stopped."""

    cause: Annotated[str, says("Why it ended.")]
    noticed: Annotated[Time, says("When it was seen that it had ended, in UTC.")]
    at: Annotated[
        Time | None,
        says("When it ended, in UTC; null where nobody saw it.", serialization_alias="ended"),
    ] = None
    exit_status: Annotated[int | None, says("Of the engine; negative for a signal.")] = None
    last_sign: Annotated[Time | None, says("Its last log line, where nobody saw its end.")] = None

    @property
    def told(self) -> str:
        if self.at is not None:
            time = f"at {_second(self.at)} UTC"
        elif self.last_sign is not None:
            time = f"between {_second(self.last_sign)} and {_second(self.noticed)} UTC"
        else:
            time = f"before {_second(self.noticed)} UTC"
        status = "" if self.exit_status is None else exit_words(self.exit_status)
        said = not status or f"({status})" in self.cause
        return f"{time}{'' if said else f' with {status}'}: {self.cause}"


HOST_TOKENS = says("That fit the host's memory; 0 without --host-cache.", ge=0)
DISK_BYTES = says("Of files that --disk-cache keeps at most; 0 without it.", ge=0)


@dataclass(frozen=True)
class ServerRecord:
    """A server that runs, or that ended by itself where it has an end."""

    process: Annotated[Process, *HIDDEN]
    """The one that supervises the server."""
    port: Port
    url: Annotated[str, says("Of its API.")]
    model: Annotated[str, says("The id that requests name.", serialization_alias="model_id")]
    artifact: Annotated[str, says("The artifact that is served.")]
    log: Annotated[str, says("What the engine prints.")]
    since: Annotated[Time, says("When it was started, in UTC.")]
    state: State
    engine: Annotated[Engine, says("What serves it.")] = "sglang"
    canary: Annotated[
        Literal["in band", "out of band"] | None,
        says("Whether stored tokens give the answers of the start; null where nobody knows."),
    ] = None
    host_tokens: Annotated[int, HOST_TOKENS] = 0
    disk_bytes: Annotated[int, DISK_BYTES] = 0
    end: Annotated[End | None, *HIDDEN] = None

    @computed_field(description="Of the process that supervises the server.")
    def pid(self) -> int:
        return self.process.pid

    @computed_field(description="Since then.")  # type: ignore[prop-decorator]
    @property
    def seconds(self) -> int:
        return round(_seconds_since(self.since))

    @classmethod
    def of_this_process(
        cls, *, host: str, port: int, model: str, artifact: str, log: Path, engine: Engine
    ) -> ServerRecord:
        me = Process.of(os.getpid())
        assert me is not None, "this process runs"
        url = f"{plan.url(host, port)}/v1"
        return cls(me, port, url, model, artifact, str(log), now(), "starting", engine)

    @property
    def path(self) -> Path:
        return folder() / f"{self.port}-{self.process.pid}.json"

    @property
    def key_file(self) -> Path:
        return self.path.with_suffix(KEY)

    @property
    def last_sign(self) -> str:
        """When it wrote to its log for the last time, or was started, if it has no later log."""
        try:
            written = datetime.fromtimestamp(Path(self.log).stat().st_mtime, UTC)
        except OSError:
            return self.since
        return max(written, datetime.fromisoformat(self.since)).isoformat(timespec="seconds")

    def is_called(self, name: str) -> bool:
        """Whether `name` means this server: its port, its model or its artifact, without case."""
        names = (self.model, self.model.rpartition("/")[2], self.artifact)
        known = {one.casefold() for one in (*names, self.artifact.partition(":")[0])}
        return name.casefold() in {str(self.port), *known}


_RECORD = TypeAdapter(ServerRecord)


def folder() -> Path:
    return paths.state_dir() / "servers"


def running() -> list[ServerRecord]:
    """The records of the servers that run here, sorted by port."""
    return [record for record in _all_here() if record.end is None]


def ended(name: str | None = None) -> list[ServerRecord]:
    """The records of the servers that ended by themselves, sorted by port; with a `name` those that
    it means."""
    found = (record for record in _all_here() if record.end is not None)
    return [record for record in found if name is None or record.is_called(name)]


def last_ended(name: str | None) -> ServerRecord | None:
    """The record of the server that ended last, of those that `name` means."""
    return max(ended(name), key=lambda one: one.end.noticed if one.end else "", default=None)


def find(name: str | None, command: str) -> ServerRecord:
    """The server that `name` means; without a name, the only one."""
    all_of_them = running()
    found = [record for record in all_of_them if name is None or record.is_called(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{len(found)} servers run: {_shown(found)}.",
            hint=f"name one by its port: oscar-zoo {command} {found[0].port}",
        )
    last = last_ended(name)
    if last is not None:
        said = "; ".join(map(told, ended(name)))
        raise ServerNotFound(f"{said}.", hint=f"its log: oscar-zoo logs {last.port}")
    if not all_of_them:
        raise ServerNotFound(
            "no server of yours runs here.", hint="start one: oscar-zoo serve NAME"
        )
    raise ServerNotFound(
        f"no server here is called {name}. Running: {_shown(all_of_them)}.",
        hint="see them: oscar-zoo ps",
    )


def told(record: ServerRecord) -> str:
    assert record.end is not None, "only of a server that ended"
    return f"{record.model} on port {record.port} ended {record.end.told}"


def forget(record: ServerRecord) -> None:
    """Remove the record of a server that is gone, and the keys beside it first."""
    _forget_keys(record.path)
    with contextlib.suppress(OSError):
        record.path.unlink()


class Entry:
    """A record whose changes go to its file."""

    def __init__(self, record: ServerRecord) -> None:
        self.record = record

    def change(self, **changes: Any) -> None:
        """Change values of the record; when the disk is full, the file keeps the old ones."""
        self.record = replace(self.record, **changes)
        with contextlib.suppress(OSError):
            _write(self.record)

    def ended(self, cause: str, exit_status: int | None) -> None:
        """Note that the server ended by itself just now; see `End`."""
        time = now()
        self.change(end=End(cause, noticed=time, at=time, exit_status=exit_status))

    def keep_keys(self, key: str | None, administration_key: str | None) -> None:
        """Keep the keys of the server in private files until it ends."""
        with storage_errors(f"cannot write to {folder()}"):
            for suffix, value in {KEY: key, ADMINISTRATION_KEY: administration_key}.items():
                if value is not None:
                    place = self.record.path.with_suffix(suffix)
                    replace_file(place, value.encode() + b"\n", mode=0o600)


@contextlib.contextmanager
def registered(record: ServerRecord) -> Iterator[Entry]:
    """Keep `record` while the block runs, and longer if the server ended by itself in it."""
    with storage_errors(f"cannot write {record.path}"):
        make_folders(folder(), mode=0o700)
        for earlier in ended(str(record.port)):
            if earlier.port == record.port:
                forget(earlier)
        _write(record)
    entry = Entry(record)
    try:
        yield entry
    finally:
        if entry.record.end:
            _forget_keys(record.path)
        else:
            forget(record)


def _all_here() -> list[ServerRecord]:
    """Every record of this machine, sorted by port; those that were told for long enough go, and
    the end of a process that is gone is written into its record."""
    found = []
    for path in sorted(folder().glob("*.json")):
        record = _read(path)
        if record is None or record.process.elsewhere:
            continue
        if record.end is None and not record.process.alive:
            record = _read(path)  # again: its last act is to remove it, or to write the end into it
            if record is None:
                continue
        if record.end is None and not record.process.alive:
            killed = "the process that supervised it was killed"
            cause = killed if record.process.this_boot else "the machine was restarted"
            record = replace(record, end=End(cause, now(), last_sign=record.last_sign))
            _forget_keys(path)
            with contextlib.suppress(OSError):
                _write(record)
        if record.end and _seconds_since(record.end.noticed) > KEPT_SECONDS:
            forget(record)
        else:
            found.append(record)
    return sorted(found, key=lambda record: record.port)


def _read(path: Path) -> ServerRecord | None:
    """The record in `path`; `None` when it is being removed, or another version wrote it."""
    try:
        return _RECORD.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _forget_keys(path: Path) -> None:
    for suffix in (KEY, ADMINISTRATION_KEY):
        with contextlib.suppress(OSError):
            path.with_suffix(suffix).unlink()


def _write(record: ServerRecord) -> None:
    replace_file(record.path, json.dumps(asdict(record), indent=1).encode() + b"\n", mode=0o600)


def _shown(records: Sequence[ServerRecord]) -> str:
    return ", ".join(f"{record.model} on port {record.port}" for record in records)


def key_of(record: ServerRecord) -> str | None:
    """What clients of the server must know; `None` when it asks for no key."""
    return _content(record.key_file)


def client_of(url: str, *, timeout: float = SECONDS, key: str | None = None) -> ServerClient:
    """A client of the server at `url`, which carries the administration key if it is one of ours,
    so that `eval --url` may empty the prefix cache of a server of this user."""
    client = ServerClient(url, timeout=timeout, key=key)
    for record in running():
        if record.port == client.port and _means(client.host, record):
            found = _content(record.path.with_suffix(ADMINISTRATION_KEY))
            if found is not None:
                return ServerClient(url, timeout=timeout, key=found)
    return client


def _means(host: str, record: ServerRecord) -> bool:
    """Whether a server of ours answers at `host` and its port."""
    listens = urlsplit(record.url).hostname or ""
    here = host == "localhost" or is_loopback(host)
    return host == listens or (here and (is_loopback(listens) or listens in WILDCARDS))


def _content(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8").strip() or None
    return None


def key_for(expose: str | None, path: Path | None, *, make: bool = False) -> str | None:
    """The API key of a server, or `None` for one that listens on loopback without a key: the one
    in the file `path`, or a new one. Another address, `expose`, needs one."""
    if make and path is not None:
        raise UsageError(
            "--require-key makes a key, and --api-key-file names one.", hint="leave out one of them"
        )
    if expose is not None and path is None and not make:
        raise UsageError(
            f"listening on {expose} needs an API key.",
            hint="add --require-key, which makes one, or --api-key-file FILE",
        )
    if make:
        return f"{MADE}{secrets.token_urlsafe(32)}"
    return None if path is None else read_key(path)


def read_key(path: Path) -> str:
    if not path.is_file():
        raise PathNotFound.for_path(path, "key file")
    key = path.read_text("utf-8").strip()
    if not key or any(ord(c) < 32 for c in key):
        raise UsageError(f"{path} does not hold one line with a key.")
    return key


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _second(time: str) -> str:
    return time[:19].replace("T", " ")


def _seconds_since(time: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()
