"""Yank or deprecate an artifact of a hub, or offer it again; only the index and the card change.

The bytes stay. A yanked version is no longer found by name, but its exact digest still finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from oscar_zoo.artifact.manifest import Status
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import UsageError
from oscar_zoo.hubs.base import Change, Hub
from oscar_zoo.registry.changes import HubState, apply_change
from oscar_zoo.registry.index import IndexEntry
from oscar_zoo.registry.selecting import exact_version
from oscar_zoo.registry.version import Version

StateName = Literal["active", "deprecated", "yanked"]

_VERBS: dict[StateName, str] = {
    "active": "Offer again",
    "deprecated": "Deprecate",
    "yanked": "Yank",
}
_LONGEST_REASON = 1000


@dataclass(frozen=True)
class StatusResult:
    """What `set_status` did.

    Attributes:
        id: of the artifact.
        digest: of its payload.
        status: as it is now, or will be once `proposal` is merged.
        changed: whether anything was written.
        serial: of the index.
        revision: where the hub stands, or `None` for a proposal.
        proposal: address of the pull request that has to be merged, or `None`.
    """

    id: ArtifactId
    digest: str
    status: Status
    changed: bool
    serial: int
    revision: str | None
    proposal: str | None = None


def set_status(
    hub: Hub,
    name: str,
    state: StateName,
    *,
    reason: str | None = None,
    replaced_by: str | None = None,
    propose: bool = False,
) -> StatusResult:
    """Change the status of one artifact of `hub`; the status it has already is success and writes
    nothing.

    Args:
        hub: where; an artifact that its index lacks gets an entry.
        name: exactly one version: `NAME:TAG`, `<Model>/<tag>` or `[NAME@]sha256:PREFIX`.
        reason: for people; needed unless `state` is `active`.
        replaced_by: a version of `hub`, named like `name`, to use instead.
    """
    reason = " ".join((reason or "").split())[:_LONGEST_REASON] or None
    if state != "active" and reason is None:
        raise UsageError(
            f"a {state} version needs a reason.", hint='tell people why: --reason "..."'
        )
    seen: list[tuple[IndexEntry, int]] = []

    def make(now: HubState) -> Change | None:
        artifact = exact_version(now, name)
        instead = None if replaced_by is None else exact_version(now, replaced_by)
        if instead == artifact:
            raise UsageError(
                f"{artifact.reference} cannot replace itself.", hint="name another version"
            )
        entry = now.index.entry(artifact) or Version.on(hub, artifact).entry()
        wanted = _status(state, reason, instead.reference if instead else None)
        if _is_same(entry.status, wanted):
            seen.append((entry, now.index.serial))
            return None
        index = now.index.with_entry(entry.model_copy(update={"status": wanted}))
        seen.append((entry.model_copy(update={"status": wanted}), index.serial))
        message = f"{_VERBS[state]} {artifact}" + (f": {reason}" if reason else "")
        return Change(None, {}, now.root_files(index), now.revision, message, propose)

    applied = apply_change(hub, make)
    entry, serial = seen[-1]
    commit = applied.commit
    changed = applied.change is not None
    return StatusResult(
        entry.artifact_id,
        entry.digest,
        entry.status,
        changed,
        serial,
        commit.revision,
        commit.proposal,
    )


def _status(state: StateName, reason: str | None, replaced_by: str | None) -> Status:
    return Status(
        state=state,
        reason=reason,
        replaced_by=replaced_by,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def _is_same(now: Status, wanted: Status) -> bool:
    """Whether only the date differs; being offered needs no reason."""
    if now.state == wanted.state == "active":
        return True
    return now.model_copy(update={"date": wanted.date}) == wanted
