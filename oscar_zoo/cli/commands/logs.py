"""`oscar-zoo logs`: the log of a server."""

from __future__ import annotations

import click

from oscar_zoo.cli import build
from oscar_zoo.errors import UsageError
from oscar_zoo.serving.params import LogsParams

command = build.command(
    "logs",
    LogsParams,
    run="oscar_zoo.serving.servers:logs",
    view="oscar_zoo.cli.render.servers:print_log",
    quiet=False,
)


def _without_json(context: click.Context, _: click.Parameter, follow: bool) -> bool:
    words = context.find_root().obj or ()
    if follow and "--json" in words:
        raise UsageError(
            "--json is one object, and --follow has no end.", hint="leave out one of the two"
        )
    return follow


next(option for option in command.params if option.name == "follow").callback = _without_json
