"""`oscar-zoo stop`: end a server that runs."""

from __future__ import annotations

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("stop")
@click.argument("name", metavar="[NAME|PORT]", required=False)
@click.option("--now", is_flag=True, help="Do not wait for requests that run; they fail.")
@options.quiet_option
@options.json_option
def command(name: str | None, now: bool, quiet: bool, as_json: bool) -> int:
    """Stop a server that `oscar-zoo serve` runs, and wait until it is gone.

    Requests that run may finish, for up to five minutes. A server is named by its port, its model
    or its artifact; where only one runs, it needs no name. One that had ended by itself is told and
    forgotten.

    \b
    Examples:
      oscar-zoo stop
      oscar-zoo stop 30000
      oscar-zoo stop Qwen3-8B --now
    """
    from oscar_zoo.app import servers
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.cli.render.servers import print_stopped, stopped_facts

    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        stopped = servers.stop(name, now=now, observer=observer)
    if as_json:
        terminal.emit_json({"schema": "oscar-zoo.stop/1"} | stopped_facts(stopped))
    else:
        print_stopped(stopped)
    return 0
