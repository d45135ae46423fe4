"""Publish a verified artifact as one new version on a hub: one commit, read back and tagged.

A version never changes. Publishing the same content again succeeds, and other content under the
same id is refused. The commit counts: if the index entry, the card or the tag is missing,
publishing the same folder again repairs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.artifact.files import FileDigest, file_digest
from oscar_zoo.artifact.manifest import SIGNATURE_NAME
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.hubs.base import CARD_NAME, INDEX_NAME, Hub
from oscar_zoo.registry.card import BEGIN, END, is_damaged
from oscar_zoo.registry.changes import HubState, apply_change, read_state
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.placing import Placing, check_arrived
from oscar_zoo.registry.publishable import Publishable
from oscar_zoo.registry.score_history import merged
from oscar_zoo.registry.tags import put_tag, tag_name
from oscar_zoo.registry.version import Version


@dataclass(frozen=True)
class PublishPlan:
    """What a dry run would send.

    Attributes:
        files: every file by its path in the hub; empty when nothing has to be sent.
        message: of the commit, or `None` without one.
        parent: revision the commit is made for.
        tag: what would be tagged, or `None`.
        serial: of the index after it.
    """

    files: tuple[FileDigest, ...]
    message: str | None
    parent: str | None
    tag: str | None
    serial: int


@dataclass(frozen=True)
class PublishResult:
    """What `publish` did.

    Attributes:
        id: of the artifact.
        digest: of its payload.
        already_published: the same content was there before; index, card or tag may have been
            repaired.
        scores_updated: it was there before, and scores were added to its index entry.
        verified: the outcome of verification.
        revision: where the hub stands with it, or `None` for a dry run or proposal.
        proposal: address of the pull request that has to be merged, or `None`.
        tag: the tag that now names the version, or `None`.
        warnings: what did not work out and how to repair it.
        plan: of a dry run, else `None`.
    """

    id: ArtifactId
    digest: str
    already_published: bool
    verified: Verified
    revision: str | None = None
    proposal: str | None = None
    tag: str | None = None
    warnings: tuple[str, ...] = ()
    plan: PublishPlan | None = None
    scores_updated: bool = False


def publish(
    made: Publishable,
    hub: Hub,
    *,
    propose: bool = False,
    dry_run: bool = False,
    create: bool = False,
) -> PublishResult:
    """Publish a verified artifact.

    Args:
        made: the artifact; it may be published on several hubs.
        hub: where to.
        propose: open a pull request; no tag.
        dry_run: only say what would be sent.
        create: create a repository, or the folder of a hub, that is not there.

    Raises:
        PathNotFound: no such hub without `create`.
        UsageError: a taken alias.
        VersionExists: the version exists with other content.
        StaleRevision: others kept changing the hub.
        DigestMismatchError: the hub has other bytes than were sent.
        NetworkError, AccessError, RepositoryNotFound: see `Hub`.
    """
    version, verified = Version.of(made.id, made.files), made.verified
    placing = Placing(
        version,
        {**made.files, **made.beside},
        aliases=made.aliases,
        scores=made.scores,
        accepted=made.accepted,
        propose=propose,
    )
    if dry_run:
        return _rehearse(placing, hub, verified, create)
    applied = apply_change(hub, placing.change, create=create)
    commit, already = applied.commit, applied.change is None or applied.change.artifact is None
    scored = already and _adds_scores(placing, applied.state)
    if propose:
        where = commit.revision if already else None
        return PublishResult(
            version.id,
            version.digest,
            already,
            verified,
            where,
            commit.proposal,
            scores_updated=scored,
        )
    if not already:
        check_arrived(hub, version, made.beside)
    tag, failed = put_tag(hub, version, commit.revision)
    unsigned = _not_signed(hub, made) if already else None
    warnings = tuple(text for text in (failed, unsigned, _left_alone(applied.state.card)) if text)
    return PublishResult(
        version.id,
        version.digest,
        already,
        verified,
        commit.revision,
        tag=tag,
        warnings=warnings,
        scores_updated=scored,
    )


def _rehearse(placing: Placing, hub: Hub, verified: Verified, create: bool) -> PublishResult:
    """What publishing would do, from what the hub has now; nothing is written."""
    version, state = placing.version, read_state(hub, create=create, dry_run=True)
    change = placing.change(state)
    tag = None if placing.propose else tag_name(hub, version.id)
    plan = PublishPlan((), None, None, tag, state.index.serial)
    if change is not None:
        files = tuple(sorted(file_digest(path, data) for path, data in change.paths.items()))
        data = change.root.get(INDEX_NAME)
        serial = plan.serial if data is None else Index.from_bytes(data).serial
        plan = PublishPlan(files, change.message, change.parent, tag, serial)
    already = change is None or change.artifact is None
    scored = already and _adds_scores(placing, state)
    return PublishResult(
        version.id, version.digest, already, verified, plan=plan, scores_updated=scored
    )


def _adds_scores(placing: Placing, state: HubState) -> bool:
    """Whether the index of a hub in `state` lacks scores of what is placed on it."""
    entry = state.index.entry(placing.version.id)
    return entry is not None and merged(entry.scores, placing.scores) != entry.scores


def _not_signed(hub: Hub, made: Publishable) -> str | None:
    """A sentence where the version was published before with another signature, or with none."""
    if made.signature is None:
        return None
    listed = {file.path: file for file in hub.files(made.id)}.get(SIGNATURE_NAME)
    if listed is None:
        seen = "without a signature"
    elif (
        listed.size != len(made.signature)
        or hub.fetch(made.id, SIGNATURE_NAME, limit=listed.size) != made.signature
    ):
        seen = "with another signature"
    else:
        return None
    return (
        f"{made.id} was published {seen}, and a published version never changes: publish it under"
        " another tag to sign it."
    )


def _left_alone(card: bytes | None) -> str | None:
    if not is_damaged(card):
        return None
    return (
        f"{CARD_NAME} was left as it is: its lines {BEGIN.decode()} and {END.decode()} do not"
        " match."
    )
