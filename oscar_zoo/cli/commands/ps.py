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
    from oscar_zoo.app import server_records
    from oscar_zoo.cli.render.servers import print_servers, server_facts

    records = server_records.running()
    if as_json:
        rows = [server_facts(record) for record in records]
        terminal.emit_json({"schema": "oscar-zoo.ps/1", "servers": rows})
    elif records:
        print_servers(records)
    else:
        terminal.note("No server of yours runs here. Start one: oscar-zoo serve NAME --detach")
    return 0
