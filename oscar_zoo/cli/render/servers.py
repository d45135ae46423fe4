"""The servers that run and those that ended, for people."""

from __future__ import annotations

import sys

from oscar_zoo.cli.render import terminal
from oscar_zoo.serving.params import ENGINES, LogsParams, StopParams
from oscar_zoo.serving.servers import EndedServer, LogsReport, PsReport, StopReport


def print_servers(report: PsReport, _: object, *, quiet: bool) -> None:
    """The table, and a line about each server that ended by itself, with the next step."""
    if report.servers:
        heads = "PORT MODEL ARTIFACT ENGINE STATE CANARY UP PID URL".split()
        tiers = any(one.host_tokens for one in report.servers)
        heads += ["HOST TOKENS", "DISK"] if tiers else []
        table = terminal.table(*heads, right=(0, 6, 7, 9, 10)[: 5 if tiers else 3])
        for one in report.servers:
            minutes, seconds = divmod(one.seconds, 60)
            up = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
            row = (one.port, one.model, one.artifact, ENGINES[one.engine], one.state)
            more = (one.canary or "-", up, one.process.pid, one.url)
            disk = f"{one.disk_bytes / 1e9:.0f} GB" if one.disk_bytes else "-"
            kept = (f"{one.host_tokens:,}", disk) if tiers else ()
            table.add_row(*map(terminal.clean, (*row, *more, *kept)))
        terminal.out().print(table)
    else:
        terminal.note("No server of yours runs here. Start one: oscar-zoo serve NAME --detach")
    for ended in report.ended:
        terminal.prose(f"{_told(ended)}. Its log: oscar-zoo logs {ended.port}")


def print_stopped(report: StopReport, params: StopParams, *, quiet: bool) -> None:
    """A line for each server."""
    done = report.stopped
    if done is not None:
        terminal.out().print(terminal.clean(f"Stopped {done.model_id} on port {done.port}."))
    for one in report.forgotten:
        terminal.prose(
            f"{one.model_id} on port {one.port} had already ended ({one.told})."
            f" It is forgotten now. Its log: oscar-zoo logs {one.port}"
        )


def print_log(report: LogsReport, params: LogsParams, *, quiet: bool) -> None:
    """The lines, as they come."""
    if report.ended is not None:
        terminal.note(f"note: {_told(report.ended)}.")
    for line in report.lines:
        sys.stdout.write(terminal.printable(line) + "\n")
        if params.follow:
            sys.stdout.flush()


def _told(server: EndedServer) -> str:
    return f"{server.model_id} on port {server.port} ended {server.told}"
