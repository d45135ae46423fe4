"""Open hubs: one that people wrote as `file:PATH`, `hf:ORG/REPO[@REVISION]` or
`ms:ORG/REPO[@REVISION]`, or those that are configured by flags, then the environment, then
`config.toml`:

```toml
hubs = ["file:/srv/zoo", "hf:my-org/zoo", "default"]   # in this order; "default": the public zoos
publish = "hf:my-org/zoo"
offline = false
[network]
read = 30.0        # seconds without a byte
```
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from functools import cached_property

from pydantic import ValidationError

from oscar_zoo import paths
from oscar_zoo.artifact.names import is_path
from oscar_zoo.artifact.specs import Spec
from oscar_zoo.errors import OFFLINE_OPTION, WITHOUT_OPTION, StorageError, UsageError
from oscar_zoo.registry.hubs import table
from oscar_zoo.registry.hubs.base import Hub, Limits, is_true
from oscar_zoo.registry.hubs.local import LocalHub

FILE_NAME = "config.toml"
PUBLIC = ("hf:Zhongzhu/OSCAR-RotationZoo", "ms:togethercomputer/OSCAR-RotationZoo")
"""The zoos of the OSCAR authors, read after the zoo of this user."""

_SEPARATOR = re.compile(rf"[,\s]+(?=(?:{'|'.join(table.HUBS)}):)", re.IGNORECASE)
_OFFLINE = ("OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE")


class _File(Spec):
    hubs: tuple[str, ...] | None = None
    publish: str | None = None
    offline: bool = False
    network: Limits = Limits()


class Sources:
    """The hubs that one verb asks, in order: those `named`, else those of `OSCAR_ZOO_HUB`, of
    `config.toml`, or the zoo of this user and the public ones. Nothing is read or opened before it
    is needed, so that a verb which finds everything in a folder needs no valid configuration."""

    def __init__(self, named: str | Sequence[str] | None = None, *, offline: bool = False) -> None:
        self.named: tuple[str, ...] = (named,) if isinstance(named, str) else tuple(named or ())
        self._asked_offline = offline

    @cached_property
    def hubs(self) -> tuple[Hub, ...]:
        """The opened hubs, in order; offline only those in folders."""
        wanted = [text for text in self.read if not (self.offline and is_remote(text))]
        return tuple(open_hub(text, network=self.network) for text in wanted)

    @cached_property
    def publishing_hubs(self) -> tuple[Hub, ...]:
        """The opened hubs to publish to, those without commits last."""
        last = [scheme for scheme, kind in table.HUBS.items() if not kind.has_commits]
        wanted = sorted(self.publish, key=lambda hub: hub.partition(":")[0].casefold() in last)
        return tuple(open_hub(text, network=self.network) for text in wanted) or (open_hub(),)

    @property
    def read(self) -> tuple[str, ...]:
        listed = self._listed or self._stored.hubs
        if not listed:
            return (f"file:{paths.default_zoo_dir()}", *PUBLIC)
        return tuple(hub for text in listed for hub in (PUBLIC if text == "default" else (text,)))

    @property
    def publish(self) -> tuple[str, ...]:
        stored = self._stored.publish
        return self._listed or ((stored,) if stored else ())

    @property
    def network(self) -> Limits:
        return self._stored.network

    @property
    def are_named(self) -> bool:
        return bool(self.named or self.by_environment)

    @property
    def by_environment(self) -> str | None:
        """What `OSCAR_ZOO_HUB` names, where it decides which hubs are asked."""
        named = os.environ.get("OSCAR_ZOO_HUB", "").strip()
        return named if named and not self.named else None

    @property
    def offline(self) -> bool:
        return bool(self.go_online)

    @property
    def go_online(self) -> str:
        """How to end offline mode; empty where it is off."""
        if self._asked_offline or os.environ.get("OSCAR_ZOO_OFFLINE") == OFFLINE_OPTION:
            return WITHOUT_OPTION
        variables = " and ".join(filter(is_true, _OFFLINE))
        causes = [f"unset {variables}"] if variables else []
        if self._stored.offline:
            causes.append(f"set offline = false in {paths.config_dir() / FILE_NAME}")
        return "; ".join(causes)

    @cached_property
    def _listed(self) -> tuple[str, ...]:
        return _split(self.named) or _split([os.environ.get("OSCAR_ZOO_HUB", "")])

    @cached_property
    def _stored(self) -> _File:
        return _read()


def is_remote(text: str) -> bool:
    kind = table.kind_of(text)
    return kind is not None and kind.is_remote


def open_hub(text: str | None = None, *, network: Limits | None = None) -> Hub:
    """The hub that `text` names, or the zoo of this user; nothing is asked or created yet."""
    if text is None:
        return LocalHub(paths.default_zoo_dir(), must_exist=False)
    kind = table.kind_of(text)
    if kind is not None:
        place = text.partition(":")[2]
        if not kind.is_remote:
            return kind.open(place, None)
        return kind.open(place, network or Sources().network)
    # The text may hold somebody's password, in an address of another kind.
    text = re.sub(r"//[^/@]*@", "//***@", text)
    form = f"in a folder is written file:{text}" if os.path.lexists(text) or is_path(text) else None
    hint = f"a hub {form or f'is written {table.FORMS}'}"
    raise UsageError(f"{text[:120]!r} is not a hub.", hint=hint)


def _split(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(part.strip() for text in texts for part in _SEPARATOR.split(text) if part.strip())


def _read() -> _File:
    path = paths.config_dir() / FILE_NAME
    try:
        return _File.model_validate_json(json.dumps(tomllib.loads(path.read_text("utf-8"))))
    except FileNotFoundError:
        return _File()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        hint = "the settings are listed in docs/hubs.md"
        raise UsageError(f"{path}: {where}: {first['msg']}.", hint=hint) from None
    except OSError as error:
        raise StorageError.for_os(f"cannot read {path}", error) from None
    except (ValueError, TypeError) as error:
        hint = "repair it or move it away"
        raise UsageError(f"{path} cannot be read: {error}.", hint=hint) from None
