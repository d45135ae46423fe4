"""Look at several hubs at once, for `list` and `info`. Each hub has little time, and a hub that
fails does not stop the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from oscar_zoo.errors import (
    AccessError,
    ArtifactNotFound,
    HubTimeout,
    HubUnreachable,
    NetworkError,
    NotFoundError,
    OscarZooError,
)
from oscar_zoo.hubs.base import Hub
from oscar_zoo.hubs.deadline import in_parallel, within
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.trust import Trust
from oscar_zoo.registry.view import HubView

PATIENCE = 6.0
"""Seconds that looking at one hub may take."""


def look(hubs: Sequence[Hub]) -> tuple[list[HubView], list[OscarZooError]]:
    """Look at every hub: load its index and its listing.

    Args:
        hubs: opened hubs, in the order in which they are asked.

    Returns:
        The hubs that answered, in order, and what the others said.
    """
    if len(hubs) == 1:
        return [_load(hubs[0])], []
    answers = in_parallel([partial(_attempt, hub) for hub in hubs], workers=len(hubs) or 1)
    views = [answer for answer in answers if isinstance(answer, HubView)]
    return views, [answer for answer in answers if isinstance(answer, OscarZooError)]


def unknown_name(
    name: str, unreachable: Sequence[OscarZooError], close: Sequence[str]
) -> OscarZooError:
    """The error for a `name` that no hub has which answered.

    Args:
        unreachable: what the others said; where one of them did not answer, it may have the name.
        close: names like it that are known, best first.
    """
    silent = [error.message for error in unreachable if isinstance(error, NetworkError)]
    if silent:
        return HubUnreachable.for_unknown(name, silent, close)
    return ArtifactNotFound.for_name(name, close)


def _attempt(hub: Hub) -> HubView | OscarZooError:
    late = partial(HubTimeout.for_hub, hub.title, f"did not answer within {PATIENCE:.0f} s")
    try:
        return within(PATIENCE, partial(_load, hub), error=late)
    except (NetworkError, AccessError, NotFoundError) as error:
        return error


def _load(hub: Hub) -> HubView:
    view = HubView.open(hub, Catalog.packaged(), trust=Trust())
    hub.artifacts()
    return view
