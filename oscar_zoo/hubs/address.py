"""A hub as people write it: `file:PATH`, `hf:REPO`, `ms:REPO`, or nothing for the zoo of this user."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from oscar_zoo import paths
from oscar_zoo.errors import UsageError
from oscar_zoo.hubs.base import Hub
from oscar_zoo.hubs.local import LocalHub

_REMOTE = {"hf": "Hugging Face", "ms": "ModelScope"}


def open_hub(text: str | None = None) -> Hub:
    """The hub that `text` names.

    Args:
        text: `file:PATH` (absolute, relative or with `~`), `file:///PATH`, or `None` for the zoo of this user, a
            folder that the first publish creates.

    Raises:
        UsageError: not a hub, or one this version does not support.
    """
    if text is None:
        return LocalHub(paths.default_zoo_dir(), must_exist=False)
    scheme, colon, rest = text.partition(":")
    scheme = scheme.casefold()
    if colon and scheme == "file":
        return LocalHub(_file_path(text, rest))
    if colon and scheme in _REMOTE:
        raise UsageError(
            f"hub {text[:120]!r}: {_REMOTE[scheme]} is not supported by this version.",
            hint="use a hub in a folder: file:PATH",
        )
    form = f"file:{text}" if os.path.lexists(text) else "file:PATH"
    raise UsageError(f"{text[:120]!r} is not a hub.", hint=f"a hub in a folder is written {form}")


def _file_path(text: str, rest: str) -> Path:
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError(f"{text[:120]!r} names a host.", hint="write file:///absolute/path or file:relative/path")
        rest = "/" + unquote(path)
    if not rest or "\0" in rest:
        raise UsageError(f"{text[:120]!r} has no path.", hint="a hub in a folder is written file:PATH")
    return Path(rest).expanduser().resolve()
