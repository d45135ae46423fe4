"""Change what the index of a hub says of a version: yank or deprecate it, offer it again, or add
scores. The bytes stay.

A yanked version is no longer found by name, but its exact digest still finds it. Nothing that was
claimed once is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from oscar_zoo.artifact import manifest
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.outcome import Digest, says
from oscar_zoo.errors import UsageError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import changes, score_file
from oscar_zoo.registry.hubs.base import Change, Hub
from oscar_zoo.registry.index import IndexEntry
from oscar_zoo.registry.score_file import ScoreFile, merged
from oscar_zoo.site.facts import Name, Score, Size, Status
from oscar_zoo.site.params import AddScoresParams, DeprecateParams, UnyankParams, YankParams

StateName = Literal["active", "deprecated", "yanked"]
_VERBS = {"active": "Offer again", "deprecated": "Deprecate", "yanked": "Yank"}
_LONGEST_REASON = 1000


@dataclass(frozen=True, kw_only=True)
class _Written:
    hub: str
    id: Name
    digest: Digest
    changed: Annotated[bool, says("Whether anything was written.")]
    serial: Annotated[Size, says("Of the index.")]
    revision: Annotated[
        str | None, says("Where the hub stands now; null for a proposal, or a hub without commits.")
    ]
    proposal: Annotated[str | None, says("Address of the pull request that has to be merged.")]


@dataclass(frozen=True, kw_only=True)
class ChangedVersion(_Written):
    """A version whose status one hub has changed, or will once `proposal` is merged."""

    status: Status


@dataclass(frozen=True, kw_only=True)
class ScoredVersion(_Written):
    """A version of which one hub took scores."""

    scores: Annotated[
        tuple[Score, ...],
        says("All that the version has now, or will have once the proposal is merged."),
    ]


_IN_ORDER = "In the order in which they were written; those after a failure are missing."


@dataclass(frozen=True)
class StatusReport:
    """What oscar-zoo yank, unyank and deprecate print."""

    hubs: Annotated[tuple[ChangedVersion, ...], says(_IN_ORDER)]
    error: changes.Failure = None
    schema: Literal["oscar-zoo.status/1"] = "oscar-zoo.status/1"


@dataclass(frozen=True)
class AddedScores:
    """What oscar-zoo scores add prints."""

    hubs: Annotated[tuple[ScoredVersion, ...], says(_IN_ORDER)]
    error: changes.Failure = None
    schema: Literal["oscar-zoo.scores-added/1"] = "oscar-zoo.scores-added/1"


def run(params: YankParams | UnyankParams, observer: Observer = SILENT) -> StatusReport:
    state: StateName = "active"
    said: dict[str, Any] = {"name": params.name, "propose": params.create_pr}
    if isinstance(params, YankParams):
        state = "deprecated" if isinstance(params, DeprecateParams) else "yanked"
        said |= {"reason": params.reason, "replaced_by": params.replaced_by}
    write, hubs = partial(set_status, state=state, **said), changes.writable_hubs(params.hubs)
    return StatusReport(*changes.write_to_each(hubs, write, "Writing to", observer))


def add(params: AddScoresParams, observer: Observer = SILENT) -> AddedScores:
    said: dict[str, Any] = {"name": params.name, "propose": params.create_pr}
    said |= {"file": score_file.load(params.file), "what": path_text(params.file)}
    write, hubs = partial(attach_scores, **said), changes.writable_hubs(params.hubs)
    return AddedScores(*changes.write_to_each(hubs, write, "Writing to", observer))


def yank(
    name: str, *, reason: str, hub: str | None = None, replaced_by: str | None = None
) -> ChangedVersion:
    """Hide exactly one version, `NAME:TAG`, from names; its digest still works, with `reason` as a
    warning."""
    said = {"reason": reason, "replaced_by": replaced_by}
    return run(YankParams(name, hubs=_hubs(hub), **said)).hubs[0]  # type: ignore[arg-type]


def unyank(name: str, *, hub: str | None = None) -> ChangedVersion:
    """Offer a version by name again."""
    return run(UnyankParams(name, hubs=_hubs(hub))).hubs[0]


def deprecate(
    name: str, *, reason: str, hub: str | None = None, replaced_by: str | None = None
) -> ChangedVersion:
    """Keep a version, and warn everybody who pulls it."""
    said = {"reason": reason, "replaced_by": replaced_by}
    return run(DeprecateParams(name, hubs=_hubs(hub), **said)).hubs[0]  # type: ignore[arg-type]


def add_scores(
    name: str, file: str | Path, *, hub: str | None = None, propose: bool = False
) -> ScoredVersion:
    """Attach the scores of a score file to exactly one published version, `NAME:TAG`. What
    was measured with the most tokens or answers stands, and its history keeps the others.

    Args:
        name: the version; its digest must be that of the file.
        file: a score file, as `eval` writes it.
        hub: where; default the zoo of this user.
        propose: open a pull request instead.

    Raises:
        MalformedFile: the file is no score file.
        DigestMismatchError: the file is about other bytes.
        ArtifactNotFound: the hub has no such version.
    """
    return add(AddScoresParams(name, Path(file), hubs=_hubs(hub), create_pr=propose)).hubs[0]


def _hubs(hub: str | None) -> tuple[str, ...]:
    return (hub,) if hub else ()


def set_status(
    hub: Hub,
    name: str,
    state: StateName,
    *,
    reason: str | None = None,
    replaced_by: str | None = None,
    propose: bool = False,
) -> ChangedVersion:
    """Change the status of one artifact of `hub`; the status it has already is success and writes
    nothing. `name` and `replaced_by`, the version to use instead, are each `NAME:TAG`,
    `<Model>/<tag>` or `[NAME@]sha256:PREFIX`; only `active` needs no reason."""
    reason = " ".join((reason or "").split())[:_LONGEST_REASON] or None
    if state != "active" and reason is None:
        raise UsageError(
            f"a {state} version needs a reason.", hint='tell people why: --reason "..."'
        )

    def change(now: changes.HubState, entry: IndexEntry) -> tuple[IndexEntry, str]:
        artifact, old = entry.artifact_id, entry.status
        instead = None if replaced_by is None else now.exact(replaced_by)
        if instead == artifact:
            raise UsageError(
                f"{artifact.reference} cannot replace itself.", hint="name another version"
            )
        wanted = manifest.Status(
            state=state,
            reason=reason,
            replaced_by=instead.reference if instead else None,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
        )
        only_dates_differ = old.model_copy(update={"date": wanted.date}) == wanted
        if only_dates_differ or old.state == state == "active":
            return entry, ""
        message = f"{_VERBS[state]} {artifact}" + (f": {reason}" if reason else "")
        return entry.model_copy(update={"status": wanted}), message

    entry, made = _amend(hub, name, change, propose=propose)
    return ChangedVersion(**made, status=entry.status)


def attach_scores(
    hub: Hub, name: str, file: ScoreFile, *, what: str, propose: bool = False
) -> ScoredVersion:
    """Add the scores of `file`, which is of exactly these bytes, to one artifact of `hub`; `name`
    is as for `set_status`. Scores that it has already are success and write nothing."""

    def change(now: changes.HubState, entry: IndexEntry) -> tuple[IndexEntry, str]:
        file.check_same(entry.artifact_id, entry.digest, what=what, where=hub.title)
        scores = merged(entry.scores, file.scores)
        if scores == entry.scores:
            return entry, ""
        tasks = ", ".join(dict.fromkeys(score.task for score in file.scores))
        message = f"Add scores of {entry.artifact_id}: {tasks}"
        return entry.model_copy(update={"scores": scores}), message

    entry, made = _amend(hub, name, change, propose=propose)
    return ScoredVersion(**made, scores=entry.scores)


def _amend(
    hub: Hub,
    name: str,
    change: Callable[[changes.HubState, IndexEntry], tuple[IndexEntry, str]],
    *,
    propose: bool,
) -> tuple[IndexEntry, dict[str, Any]]:
    """Write the entry that `change` makes of that of `name`, with its message for the history; the
    same entry needs nothing. An artifact that the index lacks gets an entry."""
    seen: list[tuple[IndexEntry, int]] = []

    def make(now: changes.HubState) -> Change | None:
        artifact = now.exact(name)
        before = now.index.entry(artifact) or changes.Version.on(hub, artifact).entry()
        entry, message = change(now, before)
        if entry is before:
            seen.append((entry, now.index.serial))
            return None
        index = now.index.with_entry(entry)
        seen.append((entry, index.serial))
        return Change(None, {}, now.root_files(index), now.revision, message, propose)

    written, commit, _ = changes.apply_change(hub, make)
    entry, serial = seen[-1]
    return entry, {
        "hub": hub.name,
        "id": entry.artifact_id,
        "digest": entry.digest,
        "changed": written is not None,
        "serial": serial,
        "revision": commit.revision,
        "proposal": commit.proposal,
    }
