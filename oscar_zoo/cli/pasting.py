"""Paths and command lines as they are printed, so that they can be pasted, and files that a command
writes when its result is printed, so that no disk can take the result away.

A name is a name; a path begins with `./`, `../` or `/`, or `Model/tag` would be read as a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote

from oscar_zoo.artifact.durable import write_file
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.names import typed as typed  # also for those who print paths
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import OscarZooError
from oscar_zoo.registry.catalog import can_be_found


def pasted(path: Path | str) -> str:
    """`typed`, quoted for a shell."""
    return quote(typed(path))


def saved(folder: Path, manifest: Manifest) -> str:
    """The line about an artifact that was written to `folder`; its id stands there unless the
    folder says it."""
    named = folder.parts[-2:] == tuple(manifest.id.split("/"))
    return (
        f"Saved {terminal.clean(typed(folder))} "
        f" {'' if named else f'{manifest.id}  '}{manifest.digest}"
    )


def measuring(folder: Path, model_id: str) -> str:
    """What to do next with an artifact made without its model, whose id may mean nothing on another
    machine."""
    if can_be_found(model_id):
        return f"Next: oscar-zoo eval {pasted(folder)} --model {quote(model_id)}"
    return (
        f"To measure it, give the folder of {model_id}: oscar-zoo eval {pasted(folder)} --model"
        " FOLDER"
    )


def serving(reference: str, model_id: str) -> str:
    """What to do next with an artifact that was pulled and is for the model `model_id`."""
    if can_be_found(model_id):
        return f"Next: oscar-zoo serve {reference}"
    return f"To serve it, give the folder of the model: oscar-zoo serve {reference} --model FOLDER"


def save_after_result(files: Mapping[Path, Callable[[], bytes]], *, quiet: bool) -> int:
    """Write every file, with a line for each; what fails is one line on stderr."""
    status = 0
    for path, content in files.items():
        try:
            write_file(path, content())
        except OscarZooError as error:
            terminal.print_failure(error)  # also with --json: stdout has its one object already
            status = 1
        else:
            terminal.note(f"Saved {path}", quiet=quiet)
    return status
