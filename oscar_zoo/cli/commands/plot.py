"""`oscar-zoo plot`: draw the report of a fit again. Needs torch for moments files only."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.compute.params import PlotParams

command = build.command(
    "plot",
    PlotParams,
    run="oscar_zoo.app.fit:draw",
    view="oscar_zoo.cli.render.computing:show_drawn",
    quiet=False,
)
