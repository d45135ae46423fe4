"""Attach scores to a published artifact; only the index and the card of the hub change.

The artifact, its digest and its `oscar.json` stay as they are. Scores are added by the rules of
`score_history`, so that earlier values remain.
"""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import DigestMismatchError, UsageError
from oscar_zoo.hubs.base import Change, Hub
from oscar_zoo.registry.changes import HubState, apply_change
from oscar_zoo.registry.index import IndexEntry
from oscar_zoo.registry.score_file import ScoreFile
from oscar_zoo.registry.score_history import merged
from oscar_zoo.registry.selecting import exact_version
from oscar_zoo.registry.version import Version


@dataclass(frozen=True)
class AttachResult:
    """What `attach_scores` did.

    Attributes:
        id: of the artifact.
        digest: of its payload.
        scores: all that it has now, or will have once `proposal` is merged.
        changed: whether anything was written.
        serial: of the index.
        revision: where the hub stands, or `None` for a proposal.
        proposal: address of the pull request that has to be merged, or `None`.
    """

    id: ArtifactId
    digest: str
    scores: tuple[Score, ...]
    changed: bool
    serial: int
    revision: str | None
    proposal: str | None = None


def attach_scores(
    hub: Hub, name: str, file: ScoreFile, *, what: str, propose: bool = False
) -> AttachResult:
    """Add the scores of `file` to one artifact of `hub`; scores that it has already are success
    and write nothing.

    Args:
        hub: where; an artifact that its index lacks gets an entry.
        name: exactly one version: `NAME:TAG`, `<Model>/<tag>` or `[NAME@]sha256:PREFIX`.
        file: scores of exactly these bytes.
    """
    seen: list[tuple[IndexEntry, int]] = []

    def make(now: HubState) -> Change | None:
        artifact = exact_version(now, name)
        entry = now.index.entry(artifact) or Version.on(hub, artifact).entry()
        check_same(file, artifact, entry.digest, what=what, where=hub.title)
        scores = merged(entry.scores, file.scores)
        if scores == entry.scores:
            seen.append((entry, now.index.serial))
            return None
        entry = entry.model_copy(update={"scores": scores})
        index = now.index.with_entry(entry)
        seen.append((entry, index.serial))
        tasks = ", ".join(dict.fromkeys(score.task for score in file.scores))
        message = f"Add scores of {artifact}: {tasks}"
        return Change(None, {}, now.root_files(index), now.revision, message, propose)

    applied = apply_change(hub, make)
    entry, serial = seen[-1]
    commit = applied.commit
    return AttachResult(
        entry.artifact_id,
        entry.digest,
        entry.scores,
        applied.change is not None,
        serial,
        commit.revision,
        commit.proposal,
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
