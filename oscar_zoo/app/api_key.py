"""The API key of a server, which travels in a private file and never in an argument list."""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.errors import PathNotFound, UsageError


def key_for(expose: str | None, path: Path | None) -> str | None:
    """The API key of a server, or `None` for one that listens on loopback without a key.

    Args:
        expose: address to listen on in place of loopback; needs a key.
        path: file that holds the key, or `None`.

    Raises:
        UsageError: an address without a key.
        OscarZooError: as `read_key`.
    """
    if expose is not None and path is None:
        raise UsageError(
            f"listening on {expose} needs an API key.",
            hint="put one into a file and add --api-key-file FILE",
        )
    return None if path is None else read_key(path)


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
