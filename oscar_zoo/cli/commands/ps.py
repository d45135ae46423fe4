"""`oscar-zoo ps`: the servers that run, and those that ended by themselves."""

from __future__ import annotations

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("ps")
@options.json_option
def command(as_json: bool) -> int:
    """Show the servers that `oscar-zoo serve` runs on this machine, in any terminal.

    A server that ended by itself is told below them, until another one starts on its port, you name
    it to `oscar-zoo stop`, or three days have passed.

    \b
    Examples:
      oscar-zoo ps
      oscar-zoo ps --json
    """
    from oscar_zoo.app import server_records
    from oscar_zoo.cli.render.servers import ended_facts, print_ended, print_servers, server_facts

    running, ended = server_records.running(), server_records.ended()
    if as_json:
        rows = {"servers": [*map(server_facts, running)], "ended": [*map(ended_facts, ended)]}
        terminal.emit_json({"schema": "oscar-zoo.ps/1"} | rows)
        return 0
    if running:
        print_servers(running)
    else:
        terminal.note("No server of yours runs here. Start one: oscar-zoo serve NAME --detach")
    for record in ended:
        print_ended(record)
    return 0
