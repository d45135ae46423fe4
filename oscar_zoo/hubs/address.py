"""Open hubs: one that people wrote as `file:PATH`, `hf:ORG/REPO[@REVISION]` or
`ms:ORG/REPO[@REVISION]`, or those that are configured."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from oscar_zoo import paths
from oscar_zoo.errors import UsageError
from oscar_zoo.hubs import config, table
from oscar_zoo.hubs.base import Hub
from oscar_zoo.hubs.local import LocalHub

if TYPE_CHECKING:
    from oscar_zoo.hubs.transport import Limits


def is_remote(text: str) -> bool:
    """Whether asking the hub that `text` names needs the network."""
    kind = table.kind_of(text)
    return kind is not None and kind.is_remote


def open_hub(
    text: str | None = None, *, network: config.NetworkSettings | None = None, sharing: int = 1
) -> Hub:
    """The hub that `text` names; nothing is asked or created yet.

    Args:
        text: `file:PATH` (absolute, relative or with `~`), `file:///PATH`,
            `hf:ORG/REPO[@REVISION]`, `ms:ORG/REPO[@REVISION]`, or `None` for the zoo of this user,
            a folder that the first publish creates.
        network: limits of requests; default those of the configuration.
        sharing: how many remote hubs may have to be asked in turn: each gets its share of the
            waiting time.
    """
    if text is None:
        return LocalHub(paths.default_zoo_dir(), must_exist=False)
    kind = table.kind_of(text)
    if kind is not None:
        limits = request_limits(network or _network(kind), sharing=sharing)
        return kind.open(text.partition(":")[2], limits)
    text = re.sub(
        r"//[^/@]*@", "//***@", text
    )  # somebody's password, in an address of another kind
    form = (
        f"a hub in a folder is written file:{text}"
        if os.path.lexists(text)
        else f"a hub is written {table.FORMS}"
    )
    raise UsageError(f"{text[:120]!r} is not a hub.", hint=form)


def open_hubs(texts: Sequence[str] = (), *, offline: bool = False) -> tuple[Hub, ...]:
    """The hubs to read from, in order: those of `texts`, of the environment, of `config.toml`, or
    the defaults; see `hubs_to_read`."""
    return hubs_to_read(config.load(texts, offline=offline))


def hubs_to_read(settings: config.HubSettings) -> tuple[Hub, ...]:
    """Open the hubs that `settings` reads from, in order; in offline mode only hubs in folders."""
    wanted = [text for text in settings.read if not (settings.offline and is_remote(text))]
    remote = sum(map(is_remote, wanted))
    return tuple(
        open_hub(text, network=settings.network, sharing=max(remote, 1)) for text in wanted
    )


def publishing_hubs(texts: Sequence[str] = ()) -> tuple[Hub, ...]:
    """The hubs to publish to, those without commits last; default the zoo of this
    user."""
    settings = config.load(texts)
    wanted = sorted(settings.publish, key=_is_written_last)
    return tuple(open_hub(text, network=settings.network) for text in wanted) or (open_hub(),)


def request_limits(network: config.NetworkSettings, *, sharing: int = 1) -> Limits:
    """Limits of requests to one of `sharing` remote hubs that may have to be waited for in turn."""
    from oscar_zoo.hubs.transport import Limits

    limits = Limits(**network.model_dump(exclude_none=True))
    share = limits.answer / sharing
    return replace(limits, answer=share, connect=min(limits.connect, share))


def _network(kind: table.HubKind) -> config.NetworkSettings:
    """The configured limits; a folder has none, and needs no valid configuration."""
    return config.load().network if kind.is_remote else config.NetworkSettings()


def _is_written_last(text: str) -> bool:
    kind = table.kind_of(text)
    return kind is not None and not kind.has_commits
