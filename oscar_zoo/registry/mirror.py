"""Copy artifacts from one hub to another, byte for byte.

Each artifact is verified before it is written, and the listings of both hubs are compared at the
end. What the source's index says about an artifact (status, scores, aliases, origin) is copied
too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME, HubLocation
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import DigestMismatchError, MalformedFile, UsageError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.changes import HubState, Version, apply_change, read_state, tidy
from oscar_zoo.registry.fetch import fetch_files, fetch_signature, verify_payload
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import Hub, Progress
from oscar_zoo.registry.index import IndexEntry
from oscar_zoo.registry.status import named_versions
from oscar_zoo.registry.view import HubView, ResolvedArtifact
from oscar_zoo.registry.writing import Placing, check_arrived, put_tag

Outcome = Literal["copied", "already there", "would be copied", "proposed"]

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class MirrorResult:
    """What `mirror` did with one artifact.

    Attributes:
        id: of the artifact.
        digest: of its payload, equal on both hubs.
        outcome: what was done.
        size: bytes of its payload.
        proposal: address of the pull request that has to be merged, or `None`.
        warnings: codes of verification, and a sentence for a tag that could not be made.
    """

    id: ArtifactId
    digest: str
    outcome: Outcome
    size: int
    proposal: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MirrorOptions:
    """How to mirror: create a missing repository, open pull requests, or only say what would be
    copied."""

    create: bool = False
    propose: bool = False
    dry_run: bool = False


def mirror(
    source: Hub,
    target: Hub,
    names: Sequence[str] = (),
    *,
    catalog: Catalog | None = None,
    options: MirrorOptions | None = None,
    progress: Progress | None = None,
    told: Callable[[MirrorResult], None] = lambda result: None,
) -> tuple[MirrorResult, ...]:
    """Copy artifacts byte for byte, with or without `oscar.json`.

    Args:
        source: where from; every byte comes from one commit of it.
        target: where to.
        names: `NAME` (all its versions), `NAME:TAG`, `<Model>/<tag>`, `NAME@sha256:PREFIX`; none
            means everything.
        catalog: recipes that know the geometry of models; default the packaged ones.
        options: see `MirrorOptions`.
        progress: told about bytes fetched.
        told: called with each result as soon as it is known.

    Raises:
        ArtifactNotFound: the source has nothing of that name.
        VerificationFailed: an artifact must not be used; nothing of it was written, what came
            before it stays.
        VersionExists: the target has other content under that id.
        DigestMismatchError: bytes differ from a listing or index, or the two listings from each
            other.
        UsageError: both hubs are the same, or an alias is taken on the target.
        NetworkError, AccessError, RepositoryNotFound: see `Hub`.
    """
    options = options or MirrorOptions()
    if source.name == target.name:
        raise UsageError(
            f"{source.title} cannot be mirrored to itself.", hint="name another target"
        )
    state = HubState.read(source)
    chosen = {a.key: a for name in names for a in named_versions(state, name)}
    view = HubView(source, catalog or Catalog.packaged(), state.index)
    results, versions = [], []
    for artifact in chosen.values() if names else state.artifacts:
        version = Version.on(source, artifact)
        results.append(_mirror_one(view, version, target, options, progress))
        versions.append(version)
        told(results[-1])
    if not (options.dry_run or options.propose):
        tidy(target)
        _cross_check(versions, source, target)
    return tuple(results)


def _mirror_one(
    view: HubView, version: Version, target: Hub, options: MirrorOptions, progress: Progress | None
) -> MirrorResult:
    like, size = _source_entry(view, version), sum(file.size for file in version.payload)
    before = read_state(target, create=options.create, dry_run=options.dry_run)
    change = Placing(version, {}, like=like).change(before)
    if change is None or (options.dry_run and change.artifact is None):
        return MirrorResult(version.id, version.digest, "already there", size)
    if options.dry_run:
        return MirrorResult(version.id, version.digest, "would be copied", size)
    offer = view.offer(version.id)
    files = fetch_files(offer, progress)
    verified = verify_payload(offer, files)
    if offer.manifest_bytes is not None:
        files[FILE_NAME] = offer.manifest_bytes
    signature, left_out = _signature(offer)
    if signature is not None:
        files[SIGNATURE_NAME] = signature
    fetched = Version.of(version.id, files)
    if fetched != version:
        raise DigestMismatchError.for_content(
            str(version.id), want=version.digest, got=fetched.digest
        )
    placing = Placing(version, files, like=like, propose=options.propose, verb="Mirror")
    applied = apply_change(target, placing.change, create=options.create)
    commit, warnings = applied.commit, (*left_out, *verified.warnings)
    if commit.proposal is not None:
        return MirrorResult(version.id, version.digest, "proposed", size, commit.proposal, warnings)
    if applied.change is None or applied.change.artifact is None:
        return MirrorResult(version.id, version.digest, "already there", size, warnings=warnings)
    check_arrived(target, version, {} if signature is None else {SIGNATURE_NAME: signature})
    _, warning = put_tag(target, version, commit.revision)
    warnings = (*warnings, *((warning,) if warning else ()))
    return MirrorResult(version.id, version.digest, "copied", size, warnings=warnings)


def _signature(offer: ResolvedArtifact) -> tuple[bytes | None, tuple[str, ...]]:
    """The signature file of an offer, which goes along whoever signed it, and a sentence where it
    is none."""
    try:
        return fetch_signature(offer), ()
    except MalformedFile as error:
        return None, (f"the signature of {offer.id.reference} was left out: {error.message}",)


def _source_entry(view: HubView, version: Version) -> IndexEntry:
    """What the target's index says of a copy: what the source says, and where the source is."""
    entry = view.index.entry(version.id)
    if entry is not None and entry.digest != version.digest:
        raise DigestMismatchError.for_content(
            f"{version.id} on {view.hub.title}",
            want=f"{entry.digest} by its own index",
            got=version.digest,
            hint="the hub contradicts itself; tell its owner",
        )
    entry = entry or version.entry()
    if not address.is_remote(view.hub.name):
        return entry
    scheme, _, place = view.hub.name.partition(":")
    repo = place.partition("@")[0]
    pinned = view.hub.revision if _COMMIT.fullmatch(view.hub.revision or "") else None
    return entry.model_copy(
        update={"hubs": entry.hubs | {scheme: HubLocation(repo=repo, revision=pinned)}}
    )


def _cross_check(versions: Sequence[Version], source: Hub, target: Hub) -> None:
    """Compare what both hubs list, from one fresh answer of the target."""
    target.refresh()
    for version in versions:
        there = Version.on(target, version.id)
        if version.changed_files(there):
            raise DigestMismatchError.for_content(
                f"{version.id} on {target.title}",
                want=f"{version.digest} as on {source.title}",
                got=there.digest,
            )
