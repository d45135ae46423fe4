"""`oscar-zoo merge-moments`: several captures as one."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.compute.params import MergeParams

command = build.command(
    "merge-moments",
    MergeParams,
    run="oscar_zoo.app.fit:merge",
    view="oscar_zoo.cli.render.computing:show_merged",
)
