"""`oscar-zoo logs`: the log of a server."""

from __future__ import annotations

import click


@click.command("logs")
@click.argument("name", metavar="[NAME|PORT]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Show new lines until the server ends.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    metavar="LINES",
    help="How many lines of the end to show.",
)
def command(name: str | None, follow: bool, lines: int) -> int:
    """Show the end of the log of a server that `oscar-zoo serve` runs.

    A port also means the last server that ran there, so that you see why it ended.

    \b
    Examples:
      oscar-zoo logs
      oscar-zoo logs 30000 -n 20
      oscar-zoo logs Qwen3-8B --follow
    """
    import sys

    from oscar_zoo.app import servers
    from oscar_zoo.cli.render import terminal

    log, record = servers.log_of(name)
    alive = (lambda: record.process.alive) if follow and record is not None else None
    for line in servers.read_log(log, lines=lines, follow=alive):
        sys.stdout.write(terminal.printable(line) + "\n")
        if follow:
            sys.stdout.flush()
    return 0
