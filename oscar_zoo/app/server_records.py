"""The servers that run, and those that ended by themselves: one private file in the state folder
for each.

A record names the process that supervises a server. The process writes it. It removes it when it
stops the server, and writes the cause into it when the server ended by itself. Into a record whose
process is gone the cause is written by whoever reads it. A record of a server that ended goes when
another one starts on its port, when `stop` names it, and after `KEPT_DAYS`. Records of other
machines and containers that share the folder are left alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oscar_zoo import paths
from oscar_zoo.app.server_record import End, ServerRecord, now
from oscar_zoo.artifact.durable import make_folders, replace_file, storage_errors
from oscar_zoo.engines.sglang.launch.processes import exit_words
from oscar_zoo.errors import ServerNotFound, UsageError

KEY, ADMINISTRATION_KEY = ".key", ".administration-key"
"""Ends of the names of the files beside a record."""
KEPT_DAYS = 3.0
"""Days for which it is told that a server ended, so that Monday tells of Friday."""


def folder() -> Path:
    """The folder of the records."""
    return paths.state_dir() / "servers"


def running() -> list[ServerRecord]:
    """The records of the servers that run here, sorted by port."""
    return [record for record in _all_here() if record.end is None]


def ended() -> list[ServerRecord]:
    """The records of the servers that ended by themselves, sorted by port."""
    return [record for record in _all_here() if record.end is not None]


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
    gone = ended_called(name)
    if gone:
        raise ServerNotFound(
            f"{'; '.join(map(told, gone))}.",
            hint=f"its log: oscar-zoo logs {gone[0].port}",
        )
    if not all_of_them:
        raise ServerNotFound(
            "no server of yours runs here.", hint="start one: oscar-zoo serve NAME"
        )
    raise ServerNotFound(
        f"no server here is called {name}. Running: {_shown(all_of_them)}.",
        hint="see them: oscar-zoo ps",
    )


def ended_called(name: str | None) -> list[ServerRecord]:
    """The records of ended servers that `name` means, the last one first; all without a name."""
    found = [record for record in ended() if name is None or record.is_called(name)]
    return sorted(found, key=lambda record: record.end.noticed if record.end else "", reverse=True)


def told(record: ServerRecord) -> str:
    """How a server ended, in one line without a full stop."""
    return f"{record.model} on port {record.port} ended {how(record)}"


def how(record: ServerRecord) -> str:
    """When, with which status and why a server ended, to stand behind "ended"."""
    end = record.end
    assert end is not None, "only of a server that ended"
    status = "" if end.exit_status is None else exit_words(end.exit_status)
    said = not status or f"({status})" in end.cause
    return f"{end.time}{'' if said else f' with {status}'}: {end.cause}"


def forget(record: ServerRecord) -> None:
    """Remove the record of a server that is gone."""
    _forget(_path(record))


@contextlib.contextmanager
def registered(record: ServerRecord) -> Iterator[Entry]:
    """Keep `record` while the block runs, and longer if the server ended by itself in it."""
    path = _path(record)
    with storage_errors(f"cannot write {path}"):
        make_folders(path.parent, mode=0o700)
        for earlier in ended():
            if earlier.port == record.port:
                forget(earlier)
        _write(path, record)
    entry = Entry(path, record)
    try:
        yield entry
    finally:
        _forget_keys(path) if entry.record.end else _forget(path)


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

    def ended(self, cause: str, exit_status: int | None) -> None:
        """Note that the server ended by itself just now; see `End`."""
        time = now()
        self.change(end=End(cause, noticed=time, at=time, exit_status=exit_status))

    def keep_keys(self, key: str | None, administration_key: str | None) -> None:
        """Keep the keys of the server in private files until it ends."""
        files = {KEY: key, ADMINISTRATION_KEY: administration_key}
        with storage_errors(f"cannot write to {self.path.parent}"):
            for suffix, value in files.items():
                if value is not None:
                    place = self.path.with_suffix(suffix)
                    replace_file(place, value.encode() + b"\n", mode=0o600)


def _path(record: ServerRecord) -> Path:
    return folder() / f"{record.port}-{record.process.pid}.json"


def _all_here() -> list[ServerRecord]:
    """Every record of this machine, sorted by port; those that were told for long enough go."""
    found = []
    for path in sorted(folder().glob("*.json")):
        record = _read(path)
        if record is None or record.process.elsewhere:
            continue
        if record.end is None and not record.process.alive:
            record = _notice_end(path)
        if record is not None and record.end is not None and record.end.days > KEPT_DAYS:
            _forget(path)
        elif record is not None:
            found.append(record)
    return sorted(found, key=lambda record: record.port)


def _read(path: Path) -> ServerRecord | None:
    """The record in `path`; `None` when it is being removed, or another version wrote it."""
    try:
        return ServerRecord.parse(path.read_bytes())
    except (OSError, ValueError):
        return None


def _notice_end(path: Path) -> ServerRecord | None:
    """The record of a process that is gone, with its end in it; `None` when it removed it."""
    record = _read(path)  # again: its last act is to remove it, or to write the end into it
    if record is None or record.end is not None:
        return record
    killed = "the process that supervised it was killed"
    cause = killed if record.process.this_boot else "the machine was restarted"
    record = replace(record, end=End(cause, noticed=now(), last_sign=record.last_sign))
    _forget_keys(path)
    with contextlib.suppress(OSError):
        _write(path, record)
    return record


def _forget(path: Path) -> None:
    """Remove a record, and the keys beside it first."""
    _forget_keys(path)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _forget_keys(path: Path) -> None:
    for suffix in (KEY, ADMINISTRATION_KEY):
        with contextlib.suppress(OSError):
            path.with_suffix(suffix).unlink(missing_ok=True)


def _write(path: Path, record: ServerRecord) -> None:
    replace_file(path, json.dumps(asdict(record), indent=1).encode() + b"\n", mode=0o600)


def _shown(records: Sequence[ServerRecord]) -> str:
    return ", ".join(f"{record.model} on port {record.port}" for record in records)
