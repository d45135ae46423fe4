"""One hub as the registry sees it: its listing, its index and what this package knows, joined by
artifact id; and which of its versions a name means.

Names are compared without case, in this order: exact id `<Model>/<tag>`, model name or hub id (the
organisation may be dropped where that is unique), alias. A name that means several versions is an
error that lists them, never a guess; deprecated versions count only where none is active, and
withdrawn (yanked) ones are found by digest only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME, Manifest, Status, is_payload
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import AmbiguousName, ArtifactNotFound, MalformedFile, SignatureError
from oscar_zoo.next_step import Compute, ListNames
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import INDEX_NAME, TIMESTAMP_NAME, Hub, HubFile
from oscar_zoo.registry.index import ACCEPTED, Index, IndexEntry
from oscar_zoo.registry.trust import Promise, Trust

_READS, _BETWEEN_READS = 4, 0.1
"""How often a folder is read until its index and timestamp fit, and the seconds in between."""


@dataclass(frozen=True)
class ResolvedArtifact:
    """One artifact as a hub offers it now; nothing of it is verified yet."""

    id: ArtifactId
    view: HubView
    files: tuple[HubFile, ...]
    manifest_bytes: bytes | None
    manifest: Manifest | None
    signature: HubFile | None = None

    @property
    def hub(self) -> Hub:
        return self.view.hub

    @property
    def digest(self) -> str | None:
        known = [FileDigest(f.path, f.sha256, f.size) for f in self.files if f.sha256 is not None]
        return artifact_digest(known) if len(known) == len(self.files) else None

    @property
    def manifest_sha256(self) -> str | None:
        return sha256_hex(self.manifest_bytes) if self.manifest_bytes is not None else None

    @property
    def packaged(self) -> Manifest | None:
        """The manifest shipped with this package; its checksums, where known, are promises."""
        return self.view.catalog.manifest(self.id)

    @property
    def entry(self) -> IndexEntry | None:
        return self.view.index.entry(self.id)

    @property
    def geometry(self) -> Geometry | None:
        recipe = self.view.catalog.recipe(self.id.model)
        return recipe.geometry if recipe else None

    @property
    def expected_digest(self) -> str | None:
        promise = self.packaged_promise
        return promise.digest if promise else None

    @property
    def packaged_promise(self) -> Promise | None:
        """What this package says of the payload. A packaged manifest speaks of what is on the hub;
        what was seen elsewhere is a promise of the past."""
        if self.packaged is not None and self.packaged.digest is not None:
            by = "the manifest shipped with oscar-zoo"
            return Promise(self.packaged.digest, None, by, final=True, about_manifest=False)
        known = self.view.catalog.seen(self.id)
        if known is None:
            return None
        by = f"the list shipped with oscar-zoo (seen in {known.seen.repository})"
        return Promise(known.digest, None, by, about_manifest=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        status, entry = self.view.status(self.id), self.entry
        sentences = [] if status.state == "active" else [status_sentence(self.id, status)]
        if entry is not None and "poor" in entry.accepted:
            sentences.append(f"{self.id.reference} {ACCEPTED['poor']}")
        return tuple(sentences)


@dataclass(frozen=True)
class HubView:
    """A hub with its index, and the fingerprint of the key that signed that."""

    hub: Hub
    catalog: Catalog
    index: Index
    key: str | None = None

    @classmethod
    def open(
        cls, hub: Hub, catalog: Catalog | None = None, *, trust: Trust | None = None
    ) -> HubView:
        """Read the index of `hub`, and hold it against what was seen before."""
        key, data = None, hub.root_file(INDEX_NAME)
        if trust is not None:
            key, data = _signed(hub, data, trust)
        index = Index.empty()
        if data is not None:
            index = Index.from_bytes(data, what=f"{INDEX_NAME} of {hub.name}")
        if trust is not None:
            trust.check_serial(hub.name, index)
        return cls(hub, catalog or Catalog.packaged(), index, key)

    @property
    def is_remote(self) -> bool:
        return address.is_remote(self.hub.name)

    def status(self, artifact: ArtifactId) -> Status:
        """Whether it is offered by name: the hub's index says, else the packaged manifest."""
        entry, packaged = self.index.entry(artifact), self.catalog.manifest(artifact)
        if entry is not None:
            return entry.status
        return packaged.registry.status if packaged and packaged.registry else Status()

    def offer(self, artifact: ArtifactId) -> ResolvedArtifact:
        listing = {file.path: file for file in self.hub.files(artifact)}
        data = manifest = None
        names = [name for name in listing if is_payload(name)]
        if FILE_NAME in listing:
            data = self.hub.fetch(artifact, FILE_NAME, limit=strict_json.MAX_BYTES)
            manifest = Manifest.from_bytes(data, what=f"{FILE_NAME} of {artifact}")
            if manifest.artifact_id.key != artifact.key:
                text = f"{artifact} has the {FILE_NAME} of {manifest.id}."
                raise MalformedFile("manifest.id", text)
            names = [file.path for file in manifest.files]
        missing = [name for name in names if name not in listing]
        if missing or not names:
            what = ", ".join(missing) or "rotation files"
            raise ArtifactNotFound(
                f"{artifact} on {self.hub.title} has no {what}.",
                hint="the version is incomplete; tell its owner",
            )
        files = tuple(sorted(listing[name] for name in names))
        signature = listing.get(SIGNATURE_NAME)
        return ResolvedArtifact(artifact, self, files, data, manifest, signature)


def _signed(hub: Hub, data: bytes | None, trust: Trust) -> tuple[str | None, bytes | None]:
    """The key that signed the index `data` of `hub`, and the index. A folder is read again where
    its timestamp is of another index: somebody may be publishing."""
    for attempt in range(_READS):
        try:
            return trust.check_timestamp(hub.name, hub.root_file(TIMESTAMP_NAME), data), data
        except SignatureError:
            if address.is_remote(hub.name) or attempt == _READS - 1:
                raise
        time.sleep(_BETWEEN_READS)
        hub.refresh()
        data = hub.root_file(INDEX_NAME)
    raise AssertionError


def status_sentence(artifact: ArtifactId, status: Status) -> str:
    instead = f"; use {status.replaced_by}" if status.replaced_by else ""
    return f"{artifact.reference} is {status.state}: {status.reason or 'no reason given'}{instead}"


def every_version(hubs: Iterable[Hub]) -> list[Reference]:
    """Every version of every hub, each once, sorted, without the withdrawn ones."""
    found: dict[str, Reference] = {}
    for hub in hubs:
        view = HubView.open(hub)
        for artifact in hub.artifacts():
            if view.status(artifact).state != "yanked":
                found.setdefault(artifact.key, Reference(artifact.model, artifact.tag))
    return [found[key] for key in sorted(found)]


def find(reference: Reference, view: HubView) -> ResolvedArtifact:
    on_hub = view.hub.artifacts()
    exact = [a for a in on_hub if a.key == reference.name.casefold()]
    versions = exact if exact and not reference.tag else _versions(reference.name, on_hub, view)
    if not versions:
        raise _not_found(reference, on_hub, view)
    if reference.tag is not None:
        tagged = [a for a in versions if a.tag.casefold() == reference.tag.casefold()]
        if not tagged:
            raise ArtifactNotFound(
                f"{versions[0].model} has no version {reference.tag} on {view.hub.title}.",
                hint=f"it has {', '.join(a.reference for a in versions)}",
            )
        versions = tagged
    if reference.digest is not None:
        return _with_digest(reference, reference.digest, versions, view)
    return view.offer(_choose(reference, versions, view))


def _versions(name: str, on_hub: Sequence[ArtifactId], view: HubView) -> list[ArtifactId]:
    recipe = view.catalog.recipe(name)
    if recipe is None:
        aliased = {a.key for a in view.catalog.aliased(name)}
        aliased |= {entry.artifact_id.key for entry in view.index.aliased(name)}
        if aliased:
            return [a for a in on_hub if a.key in aliased]
    folder = recipe.name if recipe else name.rsplit("/", 1)[-1]
    found = [a for a in on_hub if a.model.casefold() == folder.casefold()]
    if recipe is not None or "/" not in name:
        return found
    # An organisation the zoo does not know: only what the hub's own index or manifests say is that
    # model.
    if view.catalog.recipe(folder) is not None:
        return []
    return [a for a in found if (_base_model(a, view) or "").casefold() == name.casefold()]


def _base_model(artifact: ArtifactId, view: HubView) -> str | None:
    entry = view.index.entry(artifact)
    if entry is not None and entry.model is not None:
        return entry.model
    manifest = view.offer(artifact).manifest
    return manifest.model.id if manifest is not None else None


def _with_digest(
    reference: Reference, prefix: str, versions: Iterable[ArtifactId], view: HubView
) -> ResolvedArtifact:
    """The one version whose digest starts with `prefix`; withdrawn ones too, with their warning."""
    offers = [view.offer(artifact) for artifact in versions]
    found = [o for o in offers if (o.digest or o.expected_digest or "").startswith(prefix)]
    if not found:
        offered = ", ".join(f"{o.id.reference}@{o.digest}" for o in offers)
        text = f"nothing called {reference} is on {view.hub.title}."
        raise ArtifactNotFound(text, hint=f"it has {offered}")
    if len(found) > 1:
        raise AmbiguousName.for_name(str(reference), [o.id.reference for o in found])
    return found[0]


def _choose(reference: Reference, versions: list[ArtifactId], view: HubView) -> ArtifactId:
    states = {artifact: view.status(artifact).state for artifact in versions}
    usable = [a for a in versions if states[a] != "yanked"]
    if not usable:
        first = versions[0]
        what = f"every version of {reference} on {view.hub.title} was withdrawn"
        if len(versions) == 1:
            what = status_sentence(first, view.status(first))
        entry = view.index.entry(first)
        named = f"{first.model}@{entry.digest if entry else 'sha256:...'}"
        raise ArtifactNotFound(f"{what}.", hint=f"to use it anyway, name its digest: {named}")
    # A deprecated version is taken only when no version is active.
    usable = [a for a in usable if states[a] == "active"] or usable
    if len(usable) == 1:
        return usable[0]
    recipe = view.catalog.recipe(reference.name)
    default = recipe.default_tag.casefold() if recipe and recipe.default_tag else None
    chosen = [a for a in usable if a.tag.casefold() == default]
    if len(chosen) != 1:  # none is the default, or a hub in a folder has two that differ in case
        raise AmbiguousName.for_name(str(reference), [a.reference for a in usable])
    return chosen[0]


def _not_found(
    reference: Reference, on_hub: Sequence[ArtifactId], view: HubView
) -> ArtifactNotFound:
    recipe = view.catalog.recipe(reference.name)
    if recipe is None:
        names = {a.model for a in on_hub} | {x for e in view.index.artifacts for x in e.aliases}
        close = view.catalog.close_matches(reference.name, names)
        error, place = ArtifactNotFound.for_name(str(reference), close), view.hub.name
        error.next_step = ListNames(None if place in address.Sources().read else place)
        if not close and "/" not in reference.name:
            error.advise(error.next_step, next_step=Compute("MODEL"))
        return error
    elsewhere = sorted(
        f"{scheme}:{place.repo}"
        for manifest in view.catalog.manifests(recipe.name)
        if manifest.registry
        for scheme, place in manifest.registry.hubs.items()
    )
    return ArtifactNotFound(
        f"{recipe.name} is not on {view.hub.title}.",
        hint=f"another hub has it: --hub {elsewhere[0]}" if elsewhere else None,
        next_step=ListNames(view.hub.name),
    )
