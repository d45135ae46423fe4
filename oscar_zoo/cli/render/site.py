"""What `site` shows."""

from __future__ import annotations

from oscar_zoo.app.site import BuiltSite
from oscar_zoo.cli.render import terminal


def emit_site(built: BuiltSite) -> None:
    """The JSON of `site`."""
    facts = {
        "output": str(built.output),
        "index": str(built.index),
        "artifacts": built.artifacts,
        "files": built.files,
        "bytes": built.nbytes,
        "notes": [error.message for error in built.unreachable],
    }
    terminal.emit_json({"schema": "oscar-zoo.site/1"} | facts)


def print_site(built: BuiltSite) -> None:
    """Where it is, and what it has."""
    terminal.out().print(
        terminal.clean(
            f"{built.artifacts} artifacts, {built.files} files,"
            f" {terminal.megabytes(built.nbytes)}: {built.index}"
        )
    )
    for error in built.unreachable:
        terminal.note(f"note: {error.message}")
