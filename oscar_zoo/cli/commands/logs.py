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
    from oscar_zoo.cli import server_control

    log, record = server_control.log_of(name)
    alive = (lambda: record.process.alive) if follow and record is not None else None
    server_control.show_log(log, lines=lines, follow=alive)
    return 0
