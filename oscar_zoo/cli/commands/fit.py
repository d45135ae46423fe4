"""`oscar-zoo fit`: another method from the moments of an earlier capture."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.compute.params import FitCommand

command = build.command(
    "fit", FitCommand, run="oscar_zoo.app.fit:run", view="oscar_zoo.cli.render.computing:show_fit"
)
