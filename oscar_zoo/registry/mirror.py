"""Copy artifacts from one hub to another, byte for byte.

Each artifact is verified before it is written, and the listings of both hubs are compared at the
end. What the source's index says about an artifact (status, scores, aliases, origin) is copied
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, InstanceOf, PlainSerializer

from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME, HubLocation
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Digest, says
from oscar_zoo.errors import DigestMismatchError, MalformedFile, UsageError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import changes
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.fetch import fetch_files, fetch_signature, verify_payload
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import Change, Hub, Progress, is_commit
from oscar_zoo.registry.index import IndexEntry
from oscar_zoo.registry.params import MirrorParams
from oscar_zoo.registry.view import HubView

Outcome = Literal["copied", "already there", "would be copied", "proposed"]
_Shown = Literal["copied", "already_there", "would_be_copied", "proposed"]


@dataclass(frozen=True)
class MirrorResult:
    """What was done with one artifact."""

    id: Annotated[InstanceOf[ArtifactId], PlainSerializer(str, return_type=str)]
    digest: Annotated[Digest, says("Equal on both hubs.")]
    outcome: Annotated[
        Outcome, PlainSerializer(lambda said: said.replace(" ", "_"), return_type=_Shown)
    ]
    size: Annotated[int, Field(ge=0, serialization_alias="bytes", description="Of its files.")]
    proposal: Annotated[str | None, says("Address of the pull request that has to be merged.")] = (
        None
    )
    warnings: Annotated[
        tuple[str, ...], says("Codes of verification, and sentences about what did not work out.")
    ] = ()


@dataclass(frozen=True)
class MirrorReport:
    """What oscar-zoo mirror prints."""

    source: Annotated[str, says("The hub that was read.")]
    target: Annotated[str, says("The hub that was written.")]
    artifacts: tuple[MirrorResult, ...]
    schema: Literal["oscar-zoo.mirror/1"] = "oscar-zoo.mirror/1"


def _ignore(result: MirrorResult) -> None:
    """For callers who wait for the whole report."""


def run(
    params: MirrorParams,
    observer: Observer = SILENT,
    told: Callable[[MirrorResult], None] = _ignore,
) -> MirrorReport:
    """Copy artifacts between hubs and compare the digests of both; `told` hears of each."""
    if bool(params.names) == params.everything:
        raise UsageError(
            "name artifacts, or ask for --all of them.",
            hint=f"see them: oscar-zoo list --hub {params.source}",
        )
    source, target = address.open_hub(params.source), address.open_hub(params.target)
    changes.check_online(source)
    changes.check_online(target)

    def tell(result: MirrorResult) -> None:
        observer.begin((), timed=False)
        told(result)

    results = copy_all(
        source,
        target,
        params.names,
        create=params.create,
        propose=params.create_pr,
        dry_run=params.dry_run,
        progress=lambda name, done, total: observer.advance(name, done, total, "bytes"),
        told=tell,
    )
    return MirrorReport(params.source, params.target, results)


def mirror(
    source: str,
    target: str,
    names: Sequence[str] = (),
    *,
    create: bool = False,
    dry_run: bool = False,
) -> tuple[MirrorResult, ...]:
    """Copy artifacts (all of them, or `names`) between hubs, byte for byte, and compare the digests
    of both.

    Raises:
        VersionExists: the target has other content under an id.
        IntegrityError: bytes are not what they must be.
    """
    wanted = tuple(names)
    params = MirrorParams(
        source, target, wanted, everything=not wanted, create=create, dry_run=dry_run
    )
    return run(params).artifacts


def copy_all(
    source: Hub,
    target: Hub,
    names: Sequence[str] = (),
    *,
    create: bool = False,
    propose: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    told: Callable[[MirrorResult], None] = _ignore,
) -> tuple[MirrorResult, ...]:
    """Copy artifacts byte for byte, each from one commit of `source`; without names all of them."""
    if source.name == target.name:
        raise UsageError(
            f"{source.title} cannot be mirrored to itself.", hint="name another target"
        )
    state = changes.HubState.read(source)
    chosen = dict.fromkeys(artifact for name in names for artifact in state.named(name))
    view = HubView(source, Catalog.packaged(), state.index)
    results, versions = [], []
    for artifact in chosen if names else state.artifacts:
        version = changes.Version.on(source, artifact)
        before = changes.read_state(target, create=create, dry_run=dry_run)
        copy = partial(changes.placed, version=version, like=_source_entry(view, version))
        change = copy(before, files={})
        new = change is not None and change.artifact is not None
        if change is None or dry_run:
            size = sum(file.size for file in version.payload)
            outcome: Outcome = "would be copied" if new else "already there"
            result = MirrorResult(version.id, version.digest, outcome, size)
        else:
            result = _copied(view, version, target, copy, create, propose, progress)
        results.append(result)
        versions.append(version)
        told(result)
    if not (dry_run or propose):
        changes.tidy(target)
        target.refresh()  # what both list is compared from one fresh answer
        for version in versions:
            there = changes.Version.on(target, version.id)
            if version.changed_files(there):
                raise DigestMismatchError.for_content(
                    f"{version.id} on {target.title}",
                    want=f"{version.digest} as on {source.title}",
                    got=there.digest,
                )
    return tuple(results)


def _copied(
    view: HubView,
    version: changes.Version,
    target: Hub,
    copy: Callable[..., Change | None],
    create: bool,
    propose: bool,
    progress: Progress | None,
) -> MirrorResult:
    """What came of a copy, for which the files are fetched and verified first."""
    offer = view.offer(version.id)
    files = fetch_files(offer, progress)
    warnings = verify_payload(offer, files).warnings
    if offer.manifest_bytes is not None:
        files[FILE_NAME] = offer.manifest_bytes
    beside = {}
    try:
        signature = fetch_signature(offer)  # which goes along whoever signed it
        beside = {} if signature is None else {SIGNATURE_NAME: signature}
    except MalformedFile as error:
        text = f"the signature of {offer.id.reference} was left out: {error.message}"
        warnings = (text, *warnings)
    fetched = changes.Version.of(version.id, files)
    if fetched != version:
        raise DigestMismatchError.for_content(
            str(version.id), want=version.digest, got=fetched.digest
        )
    change = partial(copy, files=files | beside, propose=propose, verb="Mirror")
    written, commit, _ = changes.apply_change(target, change, create=create)
    outcome: Outcome = "copied"
    if commit.proposal is not None:
        outcome = "proposed"
    elif written is None or written.artifact is None:
        outcome = "already there"
    else:
        changes.check_arrived(target, version, beside)
        _, failed = changes.put_tag(target, version, commit.revision)
        warnings = (*warnings, failed) if failed else warnings
    size = sum(file.size for file in version.payload)
    return MirrorResult(version.id, version.digest, outcome, size, commit.proposal, warnings)


def _source_entry(view: HubView, version: changes.Version) -> IndexEntry:
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
    pinned = view.hub.revision if is_commit(view.hub.revision) else None
    return entry.model_copy(
        update={"hubs": entry.hubs | {scheme: HubLocation(repo=repo, revision=pinned)}}
    )
