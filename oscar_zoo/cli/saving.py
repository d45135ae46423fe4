"""Files that a command writes when its result is printed, so that no disk can take the result
away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from oscar_zoo.artifact.durable import write_file
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import OscarZooError


def save_after_result(files: Mapping[Path, Callable[[], bytes]], *, quiet: bool) -> int:
    """Write every file, with a line for each; what fails is one line on stderr."""
    status = 0
    for path, content in files.items():
        try:
            write_file(path, content())
        except OscarZooError as error:
            # also with --json: stdout has its one object already
            terminal.print_error(error.code, error.message, error.hint, as_json=False)
            status = 1
        else:
            terminal.note(f"Saved {path}", quiet=quiet)
    return status
