"""Where artifacts are read from: the configuration is loaded once, and every hub is opened once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

from oscar_zoo.hubs import address, config
from oscar_zoo.hubs.base import Hub


class Sources:
    """The hubs that one use case asks, in order, and whether it may ask them.

    Nothing is read or opened before it is needed, so a use case that finds everything in a folder
    needs no valid configuration.

    Args:
        named: hubs as people write them; without any, those of `OSCAR_ZOO_HUB`, of `config.toml`,
            or the zoo of this user and the public ones.
        offline: use hubs in folders only; the configuration and the environment may say so too.
    """

    def __init__(self, named: str | Sequence[str] | None = None, *, offline: bool = False) -> None:
        self.named: tuple[str, ...] = (named,) if isinstance(named, str) else tuple(named or ())
        self.asked_offline = offline

    @cached_property
    def settings(self) -> config.HubSettings:
        """The configuration in force; raises `UsageError` when `config.toml` is malformed."""
        return config.load(self.named, offline=self.asked_offline)

    @cached_property
    def hubs(self) -> tuple[Hub, ...]:
        """The opened hubs, in order; raises `UsageError` when one of the names is not a hub."""
        return address.hubs_to_read(self.settings)

    @property
    def are_named(self) -> bool:
        """Whether the caller or `OSCAR_ZOO_HUB` names the hubs."""
        return bool(self.named or os.environ.get("OSCAR_ZOO_HUB", "").strip())

    @property
    def by_environment(self) -> str | None:
        """What `OSCAR_ZOO_HUB` names, where it decides which hubs are asked; else `None`."""
        named = os.environ.get("OSCAR_ZOO_HUB", "").strip()
        return named if named and not self.named else None

    @property
    def offline(self) -> bool:
        """Whether no hub may be asked over the network."""
        return self.settings.offline

    @property
    def go_online(self) -> str:
        """How to end offline mode."""
        return self.settings.go_online
