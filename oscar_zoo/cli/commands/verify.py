"""`oscar-zoo verify`: check files, folders, trees or installed artifacts. Needs no torch."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.registry.params import VerifyParams

command = build.command(
    "verify",
    VerifyParams,
    run="oscar_zoo.registry.verify:run",
    view="oscar_zoo.cli.render.outcomes:print_report",
)
