"""`oscar-zoo mirror`: copy artifacts from hub to hub. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from oscar_zoo.cli import build
from oscar_zoo.registry.params import MirrorParams

if TYPE_CHECKING:
    from oscar_zoo.observer import Observer
    from oscar_zoo.registry.mirror import MirrorReport


def run(params: MirrorParams, observer: Observer) -> MirrorReport:
    """Mirror, and print each artifact when it is there: a later one may fail."""
    from oscar_zoo.cli.render.writing import print_mirrored
    from oscar_zoo.registry import mirror

    if click.get_current_context().params["as_json"]:
        return mirror.run(params, observer)
    return mirror.run(params, observer, print_mirrored)


command = build.command(
    "mirror",
    MirrorParams,
    run="oscar_zoo.cli.commands.mirror:run",
    view="oscar_zoo.cli.render.writing:print_end_of_mirror",
)
