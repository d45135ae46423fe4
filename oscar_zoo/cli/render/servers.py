"""The servers that run and those that ended, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oscar_zoo.app.server_record import ServerRecord
from oscar_zoo.app.server_records import how, told
from oscar_zoo.cli.render import terminal


def server_facts(record: ServerRecord) -> dict[str, Any]:
    """One server for `--json`."""
    return {
        "port": record.port,
        "model_id": record.model,
        "artifact": record.artifact,
        "url": record.url,
        "state": record.state,
        "pid": record.process.pid,
        "since": record.since,
        "seconds": round(record.seconds),
        "log": record.log,
    }


def ended_facts(record: ServerRecord) -> dict[str, Any]:
    """One server that ended by itself, for `--json`."""
    end = record.end
    assert end is not None, "only of a server that ended"
    return {
        "port": record.port,
        "model_id": record.model,
        "artifact": record.artifact,
        "since": record.since,
        "ended": end.at,
        "last_sign": end.last_sign,
        "noticed": end.noticed,
        "exit_status": end.exit_status,
        "cause": end.cause,
        "log": record.log,
    }


def print_ended(record: ServerRecord) -> None:
    """A line for people about a server that ended by itself, with the next step."""
    terminal.prose(f"{told(record)}. Its log: oscar-zoo logs {record.port}")


def stopped_facts(stopped: ServerRecord | list[ServerRecord]) -> dict[str, Any]:
    """What `stop` did, for `--json`: the server that it stopped, or those that had ended."""
    if isinstance(stopped, list):
        return {"stopped": None, "forgotten": [*map(ended_facts, stopped)]}
    told = {"port": stopped.port, "model_id": stopped.model, "pid": stopped.process.pid}
    return {"stopped": told, "forgotten": []}


def print_stopped(stopped: ServerRecord | list[ServerRecord]) -> None:
    """What `stop` did, for people, in a line for each server."""
    if isinstance(stopped, ServerRecord):
        terminal.out().print(terminal.clean(f"Stopped {stopped.model} on port {stopped.port}."))
        return
    for record in stopped:
        terminal.prose(
            f"{record.model} on port {record.port} had already ended ({how(record)})."
            f" It is forgotten now. Its log: oscar-zoo logs {record.port}"
        )


def print_servers(records: Sequence[ServerRecord]) -> None:
    """The table for people."""
    table = terminal.table(
        "PORT", "MODEL", "ARTIFACT", "STATE", "UP", "PID", "URL", right=(0, 4, 5)
    )
    for record in records:
        minutes, seconds = divmod(round(record.seconds), 60)
        cells = (
            record.port,
            record.model,
            record.artifact,
            record.state,
            f"{minutes // 60}:{minutes % 60:02}:{seconds:02}",
            record.process.pid,
            record.url,
        )
        table.add_row(*(terminal.clean(cell) for cell in cells))
    terminal.out().print(table)
