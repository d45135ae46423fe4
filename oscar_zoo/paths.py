"""Where state lives on this machine: cache, data, state and configuration folders.

Environment variables win over the platform's defaults: `OSCAR_ZOO_CACHE`, `OSCAR_ZOO_DATA`,
`OSCAR_ZOO_STATE`, `OSCAR_ZOO_CONFIG`.
Nothing here creates a folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

APP = "oscar-zoo"
CACHE = "OSCAR_ZOO_CACHE"


def _folder(variable: str, default: Path) -> Path:
    value = os.environ.get(variable)
    return Path(value).expanduser().absolute() if value else default


def cache_dir() -> Path:
    """Folder of the content-addressed store (`blobs/`, `artifacts/`)."""
    return _folder(CACHE, platformdirs.user_cache_path(APP))


def data_dir() -> Path:
    """Folder of the embedded default zoo and of other data the user owns."""
    return _folder("OSCAR_ZOO_DATA", platformdirs.user_data_path(APP))


def default_zoo_dir() -> Path:
    """The hub in a folder that `publish` and `pull` use when no other is named."""
    return data_dir() / "zoo"


def state_dir() -> Path:
    """Folder of logs and of what this user has seen: first digests, index serials."""
    return _folder("OSCAR_ZOO_STATE", platformdirs.user_state_path(APP))


def logs_dir() -> Path:
    """Folder of the logs of servers."""
    return state_dir() / "logs"


def config_dir() -> Path:
    """Folder of `config.toml`."""
    return _folder("OSCAR_ZOO_CONFIG", platformdirs.user_config_path(APP))
