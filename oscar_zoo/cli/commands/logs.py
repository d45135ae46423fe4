"""`oscar-zoo logs`: the log of a server."""

from __future__ import annotations

import click

from oscar_zoo.cli import options

ON_A_TERMINAL = 100
"""Lines that people get to see, unless they ask for another number."""


@click.command("logs")
@click.argument("name", metavar="[NAME|PORT]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Show new lines until the server ends.")
@click.option(
    "-n",
    "--lines",
    metavar="N|all",
    help=(
        f"How many lines of the end to show, or all. [default: {ON_A_TERMINAL} on a terminal, else"
        " all]"
    ),
)
@options.json_option
def command(name: str | None, follow: bool, lines: str | None, as_json: bool) -> int:
    """Show the log of a server that `oscar-zoo serve` runs: its end on a terminal, and all of it in
    a pipe or a file.

    A server that ended by itself is meant where no other runs, and a port also means the last
    server that ran there, so that you see why it ended.

    \b
    Examples:
      oscar-zoo logs
      oscar-zoo logs 30000 -n 20
      oscar-zoo logs 30000 --lines all
      oscar-zoo logs Qwen3-8B --follow
      oscar-zoo logs 30000 -n 20 --json
    """
    import sys

    from oscar_zoo.app import server_records, servers
    from oscar_zoo.cli import parsing
    from oscar_zoo.cli.render import terminal
    from oscar_zoo.cli.render.servers import ended_facts
    from oscar_zoo.errors import UsageError

    if follow and as_json:
        raise UsageError(
            "--json is one object, and --follow has no end.", hint="leave out one of the two"
        )
    usual = ON_A_TERMINAL if sys.stdout.isatty() else None
    number = usual if lines is None else parsing.parse_lines(lines)
    log, record = servers.log_of(name)
    gone = record if record is not None and record.end is not None else None
    if as_json:
        ended = ended_facts(gone) if gone else None
        found = [*servers.read_log(log, lines=number)]
        facts = {"log": str(log), "ended": ended, "lines": found}
        terminal.emit_json({"schema": "oscar-zoo.logs/1"} | facts)
        return 0
    if gone is not None:
        terminal.note(f"note: {server_records.told(gone)}.")
    alive = (lambda: record.process.alive) if follow and record is not None else None
    for line in servers.read_log(log, lines=number, follow=alive):
        sys.stdout.write(terminal.printable(line) + "\n")
        if follow:
            sys.stdout.flush()
    return 0
