"""`oscar-zoo stop`: end a server that runs."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.serving.params import StopParams

command = build.command(
    "stop",
    StopParams,
    run="oscar_zoo.serving.servers:stop",
    view="oscar_zoo.cli.render.servers:print_stopped",
)
