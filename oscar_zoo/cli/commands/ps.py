"""`oscar-zoo ps`: the servers that run."""

from __future__ import annotations

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("ps")
@options.json_option
def command(as_json: bool) -> int:
    """Show the servers that `oscar-zoo serve` runs on this machine, in any terminal.

    \b
    Examples:
      oscar-zoo ps
      oscar-zoo ps --json
    """
    from oscar_zoo.cli import server_control, server_records

    rows = [server_control.facts(record) for record in server_records.running()]
    if as_json:
        terminal.emit_json({"schema": "oscar-zoo.ps/1", "servers": rows})
        return 0
    if not rows:
        terminal.note("No server of yours runs here. Start one: oscar-zoo serve NAME --detach")
        return 0
    table = terminal.table(
        "PORT", "MODEL", "ARTIFACT", "STATE", "UP", "PID", "URL", right=(0, 4, 5)
    )
    for row in rows:
        up = f"{row['seconds'] // 3600}:{row['seconds'] % 3600 // 60:02}:{row['seconds'] % 60:02}"
        cells = (
            row["port"],
            row["model_id"],
            row["artifact"],
            row["state"],
            up,
            row["pid"],
            row["url"],
        )
        table.add_row(*(terminal.clean(cell) for cell in cells))
    terminal.out().print(table)
    return 0
