"""Which hubs are read, in which order, and where things are published: flags, then environment,
then `config.toml`.

```toml
hubs = ["file:/srv/zoo", "hf:my-org/zoo", "default"]   # in this order; "default": the public zoos
publish = "hf:my-org/zoo"
offline = false
[network]
answer = 7.0        # seconds until a hub must answer
```
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, ValidationError

from oscar_zoo import paths
from oscar_zoo.artifact.specs import Spec
from oscar_zoo.errors import OFFLINE_OPTION, WITHOUT_OPTION, StorageError, UsageError
from oscar_zoo.hubs.table import HUBS

FILE_NAME = "config.toml"
PUBLIC = ("hf:Zhongzhu/OSCAR-RotationZoo", "ms:togethercomputer/OSCAR-RotationZoo")
"""The zoos of the OSCAR authors, read after the zoo of this user."""

_SEPARATOR = re.compile(rf"[,\s]+(?=(?:{'|'.join(HUBS)}):)", re.IGNORECASE)
_OFFLINE = ("OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE")
_TRUE = frozenset(("1", "true", "yes", "on"))
_Seconds = Annotated[float, Field(gt=0, le=3600)]


class NetworkSettings(Spec):
    """Limits of every request; see `transport.Limits` for what each one means."""

    connect: _Seconds | None = None
    answer: _Seconds | None = None
    read: _Seconds | None = None
    patience: _Seconds | None = None
    rate_window: _Seconds | None = None
    min_rate: Annotated[int, Field(ge=1)] | None = None
    tries: Annotated[int, Field(ge=1, le=20)] | None = None


class _File(Spec):
    hubs: tuple[str, ...] | None = None
    publish: str | None = None
    offline: bool = False
    network: NetworkSettings = NetworkSettings()


@dataclass(frozen=True)
class HubSettings:
    """What is in force.

    Attributes:
        read: hubs in the order they are asked.
        publish: where `publish` writes, or `None` for the zoo of this user.
        chosen: whether a flag, the environment or the file named the hubs; else they are the
            defaults.
        offline: whether no hub may be asked.
        go_online: how to end offline mode.
        network: limits of requests.
    """

    read: tuple[str, ...]
    publish: tuple[str, ...]
    chosen: bool
    offline: bool
    network: NetworkSettings
    go_online: str = WITHOUT_OPTION


def load(hubs: Sequence[str] = (), *, offline: bool = False) -> HubSettings:
    """The settings in force.

    Args:
        hubs: what the command line names; each may hold several, separated by commas or spaces.
    """
    stored = _read()
    named = _split(hubs) or _split([os.environ.get("OSCAR_ZOO_HUB", "")])
    listed = named or stored.hubs
    own = f"file:{paths.default_zoo_dir()}"
    read = _expand(listed) if listed else (own, *PUBLIC)
    publish = named or ((stored.publish,) if stored.publish else ())
    offline = offline or os.environ.get("OSCAR_ZOO_OFFLINE") == OFFLINE_OPTION
    causes = [WITHOUT_OPTION] if offline else []
    if variables := " and ".join(name for name in _OFFLINE if _is_true(name)):
        causes.append(f"unset {variables}")
    if stored.offline:
        causes.append(f"set offline = false in {paths.config_dir() / FILE_NAME}")
    return HubSettings(
        read,
        publish,
        bool(listed),
        bool(causes),
        stored.network,
        WITHOUT_OPTION if offline else "; ".join(causes),
    )


def _expand(listed: Sequence[str]) -> tuple[str, ...]:
    return tuple(hub for text in listed for hub in (PUBLIC if text == "default" else (text,)))


def _split(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(part.strip() for text in texts for part in _SEPARATOR.split(text) if part.strip())


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").strip().casefold() in _TRUE


def _read() -> _File:
    path = paths.config_dir() / FILE_NAME
    try:
        return _File.model_validate_json(json.dumps(tomllib.loads(path.read_text("utf-8"))))
    except FileNotFoundError:
        return _File()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"{path}: {where}: {first['msg']}.", hint="the settings are listed in docs/hubs.md"
        ) from None
    except OSError as error:
        raise StorageError.for_os(f"cannot read {path}", error) from None
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}.", hint="repair it or move it away"
        ) from None
