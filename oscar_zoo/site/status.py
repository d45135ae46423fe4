"""Change the status of a version: withdraw it, advise against it, or offer it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from oscar_zoo.artifact.outcome import says
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import status as registry
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.status import StateName, StatusResult
from oscar_zoo.registry.writing import WriteReport, writable_hubs, write_to_each
from oscar_zoo.registry.writing import Written as Done
from oscar_zoo.site.facts import Failure, Status, Written
from oscar_zoo.site.params import DeprecateParams, UnyankParams, WritingParams, YankParams

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class ChangedVersion(Written):
    """A version whose status one hub has changed."""

    status: Status


@dataclass(frozen=True)
class StatusReport:
    """What oscar-zoo yank, unyank and deprecate print."""

    hubs: Annotated[
        tuple[ChangedVersion, ...],
        says("In the order in which they were written; those after a failure are missing."),
    ]
    error: Failure = None
    schema: Literal["oscar-zoo.status/1"] = "oscar-zoo.status/1"


def run(params: YankParams | UnyankParams, observer: Observer = SILENT) -> StatusReport:
    """Set the status on one hub after the other."""
    report = _changed(params, observer)
    hubs = [ChangedVersion(hub=one.hub, **vars(one.result)) for one in report.done]
    return StatusReport(tuple(hubs), report.error)


def yank(
    name: str, *, reason: str, hub: str | None = None, replaced_by: str | None = None
) -> StatusResult:
    """Hide exactly one version, `NAME:TAG`, from names; its digest still works, with `reason` as a
    warning."""
    return _one(YankParams(name, reason=reason, replaced_by=replaced_by, hubs=_hubs(hub)))


def unyank(name: str, *, hub: str | None = None) -> StatusResult:
    """Offer a version by name again."""
    return _one(UnyankParams(name, hubs=_hubs(hub)))


def deprecate(
    name: str, *, reason: str, hub: str | None = None, replaced_by: str | None = None
) -> StatusResult:
    """Keep a version, and warn everybody who pulls it."""
    return _one(DeprecateParams(name, reason=reason, replaced_by=replaced_by, hubs=_hubs(hub)))


def _hubs(hub: str | None) -> tuple[str, ...]:
    return (hub,) if hub else ()


def _one(params: YankParams | UnyankParams) -> StatusResult:
    return _changed(params, SILENT).done[0].result


def _changed(params: YankParams | UnyankParams, observer: Observer) -> WriteReport[StatusResult]:
    state: StateName = "active"
    reason = replaced_by = None
    if isinstance(params, YankParams):
        state = "deprecated" if isinstance(params, DeprecateParams) else "yanked"
        reason, replaced_by = params.reason, params.replaced_by

    def write(hub: Hub) -> StatusResult:
        return registry.set_status(
            hub,
            params.name,
            state,
            reason=reason,
            replaced_by=replaced_by,
            propose=params.create_pr,
        )

    return to_each(params, write, observer)


def to_each(params: WritingParams, write: Callable[[Hub], R], observer: Observer) -> WriteReport[R]:
    """Write to one hub after the other. Who interrupts it is told which were written before."""
    done: list[Done[R]] = []
    try:
        return write_to_each(writable_hubs(params.hubs), write, "Writing to", observer, done.append)
    except (KeyboardInterrupt, SystemExit) as error:
        for one in done:
            error.add_note(f"written before that: {one.hub}")
        raise
