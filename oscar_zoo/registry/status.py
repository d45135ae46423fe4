"""Change what the index of a hub says of a version: yank or deprecate it, offer it again, or add
scores. The bytes stay.

A yanked version is no longer found by name, but its exact digest still finds it. Nothing that was
claimed once is lost. Unlike `resolve`, a name means yanked versions too, and nothing is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from oscar_zoo.artifact.manifest import Status
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import AmbiguousName, ArtifactNotFound, DigestMismatchError, UsageError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.changes import HubState, Version, apply_change
from oscar_zoo.registry.hubs.base import Change, Hub
from oscar_zoo.registry.index import IndexEntry
from oscar_zoo.registry.score_file import ScoreFile, merged

StateName = Literal["active", "deprecated", "yanked"]

_VERBS: dict[StateName, str] = {
    "active": "Offer again",
    "deprecated": "Deprecate",
    "yanked": "Yank",
}
_LONGEST_REASON = 1000


@dataclass(frozen=True)
class Amended:
    """What a change of an index entry did; `revision` is `None` for a proposal."""

    id: ArtifactId
    digest: str
    changed: bool
    serial: int
    revision: str | None
    proposal: str | None


@dataclass(frozen=True, kw_only=True)
class StatusResult(Amended):
    """What `set_status` did; `status` is as it will be once `proposal` is merged."""

    status: Status


@dataclass(frozen=True, kw_only=True)
class AttachResult(Amended):
    """What `attach_scores` did; `scores` are all that will be there once `proposal` is merged."""

    scores: tuple[Score, ...]


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
        name: exactly one version: `NAME:TAG`, `<Model>/<tag>` or `[NAME@]sha256:PREFIX`.
        reason: for people; needed unless `state` is `active`.
        replaced_by: a version of `hub`, named like `name`, to use instead.
    """
    reason = " ".join((reason or "").split())[:_LONGEST_REASON] or None
    if state != "active" and reason is None:
        raise UsageError(
            f"a {state} version needs a reason.", hint='tell people why: --reason "..."'
        )

    def change(now: HubState, entry: IndexEntry) -> tuple[IndexEntry, str]:
        artifact = entry.artifact_id
        instead = None if replaced_by is None else exact_version(now, replaced_by)
        if instead == artifact:
            raise UsageError(
                f"{artifact.reference} cannot replace itself.", hint="name another version"
            )
        wanted = Status(
            state=state,
            reason=reason,
            replaced_by=instead.reference if instead else None,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
        )
        if _is_same(entry.status, wanted):
            return entry, ""
        message = f"{_VERBS[state]} {artifact}" + (f": {reason}" if reason else "")
        return entry.model_copy(update={"status": wanted}), message

    entry, made = _amend(hub, name, change, propose=propose)
    return StatusResult(**vars(made), status=entry.status)


def _is_same(now: Status, wanted: Status) -> bool:
    """Whether only the date differs; being offered needs no reason."""
    if now.state == wanted.state == "active":
        return True
    return now.model_copy(update={"date": wanted.date}) == wanted


def attach_scores(
    hub: Hub, name: str, file: ScoreFile, *, what: str, propose: bool = False
) -> AttachResult:
    """Add the scores of `file`, which is of exactly these bytes, to one artifact of `hub`; `name`
    is as for `set_status`. Scores that it has already are success and write nothing."""

    def change(now: HubState, entry: IndexEntry) -> tuple[IndexEntry, str]:
        check_same(file, entry.artifact_id, entry.digest, what=what, where=hub.title)
        scores = merged(entry.scores, file.scores)
        if scores == entry.scores:
            return entry, ""
        tasks = ", ".join(dict.fromkeys(score.task for score in file.scores))
        message = f"Add scores of {entry.artifact_id}: {tasks}"
        return entry.model_copy(update={"scores": scores}), message

    entry, made = _amend(hub, name, change, propose=propose)
    return AttachResult(**vars(made), scores=entry.scores)


def _amend(
    hub: Hub,
    name: str,
    change: Callable[[HubState, IndexEntry], tuple[IndexEntry, str]],
    *,
    propose: bool,
) -> tuple[IndexEntry, Amended]:
    """Write the entry that `change` makes of that of `name`, with its message for the history; the
    same entry needs nothing. An artifact that the index lacks gets an entry."""
    seen: list[tuple[IndexEntry, int]] = []

    def make(now: HubState) -> Change | None:
        artifact = exact_version(now, name)
        before = now.index.entry(artifact) or Version.on(hub, artifact).entry()
        entry, message = change(now, before)
        if entry is before:
            seen.append((entry, now.index.serial))
            return None
        index = now.index.with_entry(entry)
        seen.append((entry, index.serial))
        return Change(None, {}, now.root_files(index), now.revision, message, propose)

    applied = apply_change(hub, make)
    (entry, serial), commit = seen[-1], applied.commit
    changed = applied.change is not None
    return entry, Amended(
        entry.artifact_id, entry.digest, changed, serial, commit.revision, commit.proposal
    )


def check_same(
    file: ScoreFile, artifact: ArtifactId, digest: str, *, what: str, where: str
) -> None:
    """Refuse scores of another artifact than this one."""
    if file.artifact_id.key != artifact.key:
        raise UsageError(
            f"{what} has scores of {file.artifact_id.reference}, not of {artifact.reference}.",
            hint=f"name the artifact that was measured: {file.artifact_id.reference}",
        )
    if file.digest != digest:
        raise DigestMismatchError.for_content(
            f"{artifact} in {where}",
            want=f"{file.digest} by {what}",
            got=digest,
            hint=f"measure these bytes: oscar-zoo eval {artifact.reference}",
        )


_SHOWN = 5


def named_versions(state: HubState, name: str) -> tuple[ArtifactId, ...]:
    """Every version that `name` fits, in any case: `NAME`, `NAME:TAG`, `<Model>/<tag>`, an alias,
    `[NAME@]sha256:PREFIX`."""
    bare = name.startswith("sha256:")
    reference = Reference.parse(f"any@{name}" if bare else name)
    known = {entry.artifact_id.key: entry.artifact_id for entry in state.index.artifacts}
    found = sorted((known | {artifact.key: artifact for artifact in state.artifacts}).values())
    if not bare:
        exact = (
            [a for a in found if a.key == reference.name.casefold()]
            if reference.tag is None
            else []
        )
        found = (
            exact
            or [a for a in found if _is_model(state, a, reference.name)]
            or [a for a in found if a.key in _aliased(state, reference)]
        )
    if reference.tag is not None:
        found = [a for a in found if a.tag.casefold() == reference.tag.casefold()]
    if reference.digest is not None:
        found = [a for a in found if _digest(state, a).startswith(reference.digest)]
    if not found:
        raise ArtifactNotFound(f"{state.hub.title} has no {name}.", hint=_content(state))
    return tuple(found)


def exact_version(state: HubState, name: str) -> ArtifactId:
    """The one version that `name` names exactly, as an alias does. The name of a model does not,
    even if the model has a single version."""
    found = named_versions(state, name)
    if len(found) > 1:
        raise AmbiguousName.for_name(name, [artifact.reference for artifact in found])
    is_id = name.casefold() == found[0].key
    if not (is_id or ":" in name or _is_alias(state, found[0], name)):
        raise UsageError(
            f"{name} does not say which version.", hint=f"name it exactly: {found[0].reference}"
        )
    return found[0]


def _is_model(state: HubState, artifact: ArtifactId, name: str) -> bool:
    entry = state.index.entry(artifact)
    names = {artifact.model.casefold(), (entry.model or artifact.model).casefold() if entry else ""}
    return name.casefold() in names


def _aliased(state: HubState, reference: Reference) -> set[str]:
    """Keys of the versions that have the name of `reference` as an alias, by the hub's index or the
    packaged manifests."""
    if reference.tag is not None:
        return set()
    packaged = Catalog.packaged().aliased(reference.name)
    listed = [entry.artifact_id for entry in state.index.aliased(reference.name)]
    return {artifact.key for artifact in (*listed, *packaged)}


def _is_alias(state: HubState, artifact: ArtifactId, name: str) -> bool:
    return not _is_model(state, artifact, name) and artifact.key in _aliased(
        state, Reference.parse(name)
    )


def _digest(state: HubState, artifact: ArtifactId) -> str:
    entry = state.index.entry(artifact)
    return entry.digest if entry is not None else Version.on(state.hub, artifact).digest


def _content(state: HubState) -> str:
    names = [artifact.reference for artifact in state.artifacts]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"it has {', '.join(names[:_SHOWN])}{more}" if names else "it has no artifacts"
