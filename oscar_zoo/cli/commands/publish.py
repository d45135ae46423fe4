"""`oscar-zoo publish`: put an artifact folder on a hub. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal

if TYPE_CHECKING:
    from oscar_zoo.hubs.base import Hub
    from oscar_zoo.registry.publish import PublishResult


@click.command("publish")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="NAME",
    help="Another name of this version. Can be repeated.",
)
@click.option(
    "--create", is_flag=True, help="Create the repository, or the folder, if there is none."
)
@options.create_pr_option
@click.option("--allow-warnings", is_flag=True, help="Publish although verification has warnings.")
@click.option("--dry-run", is_flag=True, help="Show exactly what would be sent, and send nothing.")
@options.targets_option
@options.quiet_option
@options.json_option
def command(
    folder: Path, hubs: tuple[str, ...], create_pr: bool, quiet: bool, as_json: bool, **flags: Any
) -> int:
    """Put an artifact folder on a hub, as a version that never changes.

    The folder is verified by the strict rules first; then its files, the hub's index and its card
    are written in one commit, read back and tagged. Publishing the same content again succeeds
    quietly, and repairs what an interrupted run left undone; other content under the same name and
    tag is refused (exit code 7).

    \b
    Examples:
      oscar-zoo publish ./my-rotation
      oscar-zoo publish ./my-rotation --hub hf:my-org/zoo --hub ms:my-org/zoo --dry-run
      oscar-zoo publish ./my-rotation --hub hf:their-org/zoo --create-pr
    """
    from oscar_zoo.cli import publishing

    rows: list[dict[str, Any]] = []

    def show(hub: Hub, result: PublishResult) -> None:
        rows.append(publishing.publish_row(hub, result))
        if not as_json:
            publishing.print_published(hub, result, quiet=quiet)
            if result.revision is not None:
                terminal.note(
                    f"Next: oscar-zoo pull {result.id.reference} --hub {quote(hub.name)}",
                    quiet=quiet,
                )

    call = _publisher(folder, progress=not (quiet or as_json), propose=create_pr, **flags)
    error = publishing.on_each(publishing.writable_hubs(hubs), call, show)
    return publishing.report("oscar-zoo.publish/1", rows, error, as_json=as_json)


def _publisher(folder: Path, *, progress: bool, **flags: Any) -> Callable[[Hub], PublishResult]:
    from oscar_zoo.artifact.names import path_text
    from oscar_zoo.errors import PathNotFound, UsageError
    from oscar_zoo.registry.publish import publish

    if folder.is_file():
        raise UsageError(
            f"{path_text(folder)} is a file, not an artifact folder.",
            hint="give the folder that holds it",
        )
    if not folder.is_dir():
        raise PathNotFound.for_path(path_text(folder), "artifact folder")

    def call(hub: Hub) -> PublishResult:
        with terminal.waiting(f"Publishing to {hub.title}", enabled=progress):
            return publish(folder, hub, **flags)

    return call
