"""The API key of a server, which travels in a private file and never in an argument list."""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.errors import PathNotFound, UsageError


def read_key(path: Path) -> str:
    """The API key in the file `path`.

    Raises:
        PathNotFound: there is no such file.
        UsageError: the file does not hold exactly one line.
    """
    if not path.is_file():
        raise PathNotFound.for_path(path, "key file")
    key = path.read_text("utf-8").strip()
    if not key or any(ord(c) < 32 for c in key):
        raise UsageError(f"{path} does not hold one line with a key.")
    return key
