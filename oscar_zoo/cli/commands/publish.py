"""`oscar-zoo publish`: put an artifact folder on a hub. Needs no torch."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.registry.params import PublishParams

command = build.command(
    "publish",
    PublishParams,
    run="oscar_zoo.registry.publish:run",
    view="oscar_zoo.cli.render.writing:print_published",
)
