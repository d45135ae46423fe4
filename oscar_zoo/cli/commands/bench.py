"""`oscar-zoo bench`: what an INT2 cache does for the speed of a server, measured on this
machine."""

from __future__ import annotations

import click

from oscar_zoo.cli.commands.bench_load import load_command
from oscar_zoo.cli.commands.bench_serve import serve_command


@click.group("bench")
def command() -> None:
    """Measure on this machine.

    \b
    Examples:
      oscar-zoo bench serve Qwen3-8B
      oscar-zoo bench serve --dummy-weights Qwen3-8B --batch 1 --context 100000
      oscar-zoo bench load --dummy-weights Qwen3-8B --clients 200 --seconds 600
    """


command.add_command(serve_command)
command.add_command(load_command)
