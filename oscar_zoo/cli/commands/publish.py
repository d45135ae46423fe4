"""`oscar-zoo publish`: put an artifact folder on a hub. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import click

from oscar_zoo.cli import options, render


@click.command("publish")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@options.hub_option
@options.quiet_option
@options.json_option
def command(folder: Path, hub: str | None, quiet: bool, as_json: bool) -> None:
    """Put an artifact folder on a hub, as a version that never changes.

    The folder is verified by the strict rules first. Publishing the same content again succeeds quietly; other content
    under the same name and tag is refused (exit code 7).

    \b
    Examples:
      oscar-zoo publish ./my-rotation
      oscar-zoo publish ./my-rotation --hub file:/srv/zoo
    """
    from oscar_zoo.errors import PathNotFound, UsageError
    from oscar_zoo.hubs.address import open_hub
    from oscar_zoo.registry.publish import publish

    if folder.is_file():
        raise UsageError(f"{folder} is a file, not an artifact folder.", hint="give the folder that holds it")
    if not folder.is_dir():
        raise PathNotFound.for_path(folder, "artifact folder")
    target = open_hub(hub)
    result = publish(folder, target)
    if as_json:
        facts = {"id": str(result.id), "digest": result.digest, "already_published": result.already_published}
        render.emit_json({"schema": "oscar-zoo.publish/1", "hub": target.name} | facts)
        return
    verb = "Already published" if result.already_published else "Published"
    render.out().print(f"{verb}: {render.clean(result.id.reference)} on {render.clean(target.name)}  {result.digest}")
    where = f" --hub {quote(hub)}" if hub else ""
    render.note(f"Next: oscar-zoo pull {result.id.reference}{where}", quiet=quiet)
