"""`oscar-zoo bench`: what an INT2 cache does for the speed of a server, measured on this
machine."""

from __future__ import annotations

from typing import Any

import click

from oscar_zoo.cli import build
from oscar_zoo.cli.engine_flags import FlagsCommand
from oscar_zoo.evaluate.bench.params import BenchLoadParams, BenchServeParams


@click.group("bench")
def command() -> None:
    """Measure on this machine.

    \b
    Examples:
      oscar-zoo bench serve Qwen3-8B
      oscar-zoo bench serve --dummy-weights Qwen3-8B --batch 1 --context 100000
      oscar-zoo bench load --dummy-weights Qwen3-8B --clients 200 --seconds 600
    """


def save(report: Any, params: BenchServeParams, *, quiet: bool) -> int:
    """Write the figures and the chart, and tell of sides that failed."""
    from oscar_zoo.cli.pasting import save_after_result
    from oscar_zoo.cli.render.bench import print_failures
    from oscar_zoo.evaluate.bench.report import as_csv

    def drawn() -> bytes:
        from oscar_zoo.evaluate.charts import speed_chart

        return speed_chart(report)

    files = {params.csv: lambda: as_csv(report).encode(), params.plot: drawn}
    asked = {path: content for path, content in files.items() if path is not None}
    saved = save_after_result(asked, quiet=quiet)
    print_failures(report)
    return saved


serve_command = build.command(
    "serve",
    BenchServeParams,
    run="oscar_zoo.evaluate.bench.measuring:compare",
    view="oscar_zoo.cli.render.bench:print_serve",
    then=f"{__name__}:save",
    cls=FlagsCommand,
)
serve_command.short_help = "Compare SGLang with BF16, FP8 and INT2 caches."
load_command = build.command(
    "load",
    BenchLoadParams,
    run="oscar_zoo.evaluate.bench.measuring:load",
    view="oscar_zoo.cli.render.bench:print_load",
    then="oscar_zoo.cli.render.bench:print_stop",
    cls=FlagsCommand,
)
load_command.short_help = "Put many clients on an INT2 server, some of which hang up, and end it."
command.add_command(serve_command)
command.add_command(load_command)
