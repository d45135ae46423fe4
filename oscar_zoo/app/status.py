"""Change the status of a version: withdraw it, advise against it, or offer it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import status as registry
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.status import StateName, StatusResult
from oscar_zoo.registry.writing import WriteReport, Written, ignore, writable_hubs, write_to_each


@dataclass(frozen=True)
class StatusRequest:
    """Which version gets which status, and where.

    Attributes:
        name: exactly one version: `NAME:TAG`, an alias of one, or `[NAME@]sha256:PREFIX`.
        state: the new status.
        hubs: where, in order, as people write hubs; without any, see `writing.writable_hubs`.
        reason: for people; needed unless `state` is `active`.
        replaced_by: a version of the same hub to use instead.
        propose: open a pull request instead of committing.
    """

    name: str
    state: StateName
    hubs: tuple[str, ...] = ()
    reason: str | None = None
    replaced_by: str | None = None
    propose: bool = False


def set_status(
    request: StatusRequest,
    observer: Observer = SILENT,
    told: Callable[[Written[StatusResult]], None] = ignore,
) -> WriteReport[StatusResult]:
    """Set the status on one hub after the other."""

    def write(hub: Hub) -> StatusResult:
        return registry.set_status(
            hub,
            request.name,
            request.state,
            reason=request.reason,
            replaced_by=request.replaced_by,
            propose=request.propose,
        )

    return write_to_each(writable_hubs(request.hubs), write, "Writing to", observer, told)


def yank(
    name: str, *, reason: str, hub: str | None = None, replaced_by: str | None = None
) -> StatusResult:
    """Hide exactly one version, `NAME:TAG`, from names; its digest still works, with `reason` as a
    warning."""
    return _one(StatusRequest(name, "yanked", _hubs(hub), reason, replaced_by))


def unyank(name: str, *, hub: str | None = None) -> StatusResult:
    """Offer a version by name again."""
    return _one(StatusRequest(name, "active", _hubs(hub)))


def deprecate(
    name: str, *, reason: str, hub: str | None = None, replaced_by: str | None = None
) -> StatusResult:
    """Keep a version, and warn everybody who pulls it."""
    return _one(StatusRequest(name, "deprecated", _hubs(hub), reason, replaced_by))


def _hubs(hub: str | None) -> tuple[str, ...]:
    return (hub,) if hub else ()


def _one(request: StatusRequest) -> StatusResult:
    return set_status(request).done[0].result
