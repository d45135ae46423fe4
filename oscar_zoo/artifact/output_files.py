"""Files and folders that a command writes for its user: whether they can be written, before any
work, and writing them."""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.errors import PathNotFound, UsageError


def check_file(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", hint="name a file")
    if not path.parent.is_dir():
        raise PathNotFound.for_path(path.parent, "folder")
    with durable.storage_errors(f"cannot write {path}"):
        durable.check_writable(path.parent)


def check_folder(path: Path) -> None:
    with durable.storage_errors(f"cannot write {path}"):
        durable.check_creatable(path / "any")


def write_file(path: Path, content: bytes) -> None:
    with durable.storage_errors(f"cannot write {path}"):
        durable.replace_file(path, content)
