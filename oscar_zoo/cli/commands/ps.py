"""`oscar-zoo ps`: the servers that run, and those that ended by themselves."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.serving.params import PsParams

command = build.command(
    "ps",
    PsParams,
    run="oscar_zoo.serving.servers:ps",
    view="oscar_zoo.cli.render.servers:print_servers",
    quiet=False,
)
