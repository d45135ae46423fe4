"""Files that a command writes beside its output, such as a table or a picture."""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.errors import PathNotFound, UsageError


def check_file(path: Path | None) -> None:
    """Refuse a file that could not be written in the end.

    Raises:
        UsageError: it is a folder.
        PathNotFound: its folder does not exist.
        StorageError: its folder takes no files.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", hint="name a file")
    if not path.parent.is_dir():
        raise PathNotFound.for_path(path.parent, "folder")
    with durable.storage_errors(f"cannot write {path}"):
        durable.check_writable(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write the whole file or nothing; raises `StorageError`."""
    with durable.storage_errors(f"cannot write {path}"):
        durable.replace_file(path, content)
