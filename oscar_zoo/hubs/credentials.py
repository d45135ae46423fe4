"""Where the token of a hub comes from. No token is read or stored here."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

_TRUE = ("1", "on", "yes", "true")


@dataclass(frozen=True)
class Credential:
    """Where the token of a hub comes from, never the token itself.

    Attributes:
        source: name of a variable, or path of the file that the hub's client wrote.
        is_variable: which of the two.
        exposed: whether other users of this machine can read it there.
    """

    source: str
    is_variable: bool
    exposed: bool = False


def huggingface() -> Credential | None:
    """Where the token for Hugging Face comes from, in the order of its client, or `None`."""
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").strip().lower() in _TRUE:
        return None
    found = _variable("HF_OIDC_RESOURCE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    if found is not None:
        return found
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    path = Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")).expanduser()
    try:
        status = path.stat()
    except OSError:
        return None
    if not status.st_size:
        return None
    exposed = bool(stat.S_IMODE(status.st_mode) & 0o077)
    return Credential(str(path), is_variable=False, exposed=exposed)


def modelscope() -> Credential | None:
    """The variable with the token for ModelScope, or `None`; its client keeps a login in a pickle,
    which nothing here reads."""
    return _variable("MODELSCOPE_API_TOKEN")


def _variable(*names: str) -> Credential | None:
    name = next((name for name in names if os.environ.get(name, "").strip()), None)
    return None if name is None else Credential(name, is_variable=True)
