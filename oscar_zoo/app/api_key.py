"""The API key of a server, which travels in a private file and never in an argument list."""

from __future__ import annotations

import secrets
from pathlib import Path

from oscar_zoo.errors import PathNotFound, UsageError

MADE = "oscar-zoo-"
"""Beginning of a key that we made, by which people recognise it."""


def key_for(expose: str | None, path: Path | None, *, make: bool = False) -> str | None:
    """The API key of a server, or `None` for one that listens on loopback without a key.

    Args:
        expose: address to listen on in place of loopback; needs a key.
        path: file that holds the key, or `None`.
    """
    if make and path is not None:
        raise UsageError(
            "--require-key makes a key, and --api-key-file names one.", hint="leave out one of them"
        )
    if expose is not None and path is None and not make:
        raise UsageError(
            f"listening on {expose} needs an API key.",
            hint="add --require-key, which makes one, or --api-key-file FILE",
        )
    if make:
        return f"{MADE}{secrets.token_urlsafe(32)}"
    return None if path is None else read_key(path)


def read_key(path: Path) -> str:
    """The API key in the file `path`."""
    if not path.is_file():
        raise PathNotFound.for_path(path, "key file")
    key = path.read_text("utf-8").strip()
    if not key or any(ord(c) < 32 for c in key):
        raise UsageError(f"{path} does not hold one line with a key.")
    return key
