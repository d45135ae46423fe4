"""One hub as the registry sees it: its listing, its index and what this package knows, joined by
artifact id."""

from __future__ import annotations

import time
from dataclasses import dataclass

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME, Manifest, Status, is_payload
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import ArtifactNotFound, MalformedFile, SignatureError
from oscar_zoo.registry.catalog import Catalog, KnownDigest
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import INDEX_NAME, TIMESTAMP_NAME, Hub, HubFile
from oscar_zoo.registry.index import ACCEPTED, Index, IndexEntry
from oscar_zoo.registry.trust import Promise, Trust

_READS, _BETWEEN_READS = 4, 0.1
"""How often a folder is read until its index and timestamp fit, and the seconds in between."""


@dataclass(frozen=True)
class ResolvedArtifact:
    """One artifact as a hub offers it now; nothing of it is verified yet.

    Attributes:
        packaged: the manifest shipped with this package, or `None`; its checksums, where known, are
            what we expect.
        warnings: what a person should read before using it.
    """

    id: ArtifactId
    hub: Hub
    files: tuple[HubFile, ...]
    manifest_bytes: bytes | None
    manifest: Manifest | None
    packaged: Manifest | None
    seen: KnownDigest | None
    entry: IndexEntry | None
    geometry: Geometry | None
    warnings: tuple[str, ...] = ()
    signature: HubFile | None = None

    @property
    def digest(self) -> str | None:
        """Digest of what the hub offers by its listing, or `None` when the listing lacks a
        sha256."""
        known = [FileDigest(f.path, f.sha256, f.size) for f in self.files if f.sha256 is not None]
        return artifact_digest(known) if len(known) == len(self.files) else None

    @property
    def manifest_sha256(self) -> str | None:
        """sha256 of `oscar.json`, or `None` when there is none."""
        return sha256_hex(self.manifest_bytes) if self.manifest_bytes is not None else None

    @property
    def expected_digest(self) -> str | None:
        """Digest that this package promises, or `None`."""
        promise = self.packaged_promise
        return promise.digest if promise else None

    @property
    def packaged_promise(self) -> Promise | None:
        """What this package says of the payload as a promise, or `None` when nobody has seen it; it
        says nothing of `oscar.json`.

        A packaged manifest speaks of what is on the hub. What was seen elsewhere is a promise of
        the past."""
        if self.packaged is not None and self.packaged.digest is not None:
            by = "the manifest shipped with oscar-zoo"
            return Promise(self.packaged.digest, None, by, final=True, about_manifest=False)
        if self.seen is None:
            return None
        by = f"the list shipped with oscar-zoo (seen in {self.seen.seen.repository})"
        return Promise(self.seen.digest, None, by, about_manifest=False)

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class HubView:
    """A hub with its index.

    Attributes:
        key: fingerprint of the key that signed the index, or `None`.
    """

    hub: Hub
    catalog: Catalog
    index: Index
    key: str | None = None

    @classmethod
    def open(
        cls, hub: Hub, catalog: Catalog | None = None, *, trust: Trust | None = None
    ) -> HubView:
        """Read the index of `hub`."""
        key, data = None, hub.root_file(INDEX_NAME)
        if trust is not None:
            key, data = _signed(hub, data, trust)
        index = (
            Index.empty()
            if data is None
            else Index.from_bytes(data, what=f"{INDEX_NAME} of {hub.name}")
        )
        if trust is not None:
            trust.check_serial(hub.name, index)
        return cls(hub, catalog or Catalog.packaged(), index, key)

    @property
    def is_remote(self) -> bool:
        """Whether asking the hub costs requests."""
        return address.is_remote(self.hub.name)

    def status(self, artifact: ArtifactId) -> Status:
        """Whether `artifact` is offered by name: the hub's index says, else the packaged
        manifest."""
        entry, packaged = self.index.entry(artifact), self.catalog.manifest(artifact)
        if entry is not None:
            return entry.status
        return packaged.registry.status if packaged and packaged.registry else Status()

    def aliased(self, name: str) -> set[str]:
        """Keys of the artifacts that have `name` as an alias."""
        return {a.key for a in self.catalog.aliased(name)} | {
            e.artifact_id.key for e in self.index.aliased(name)
        }

    def offer(self, artifact: ArtifactId) -> ResolvedArtifact:
        """What the hub offers for `artifact`: its listing and its `oscar.json`."""
        listing = {file.path: file for file in self.hub.files(artifact)}
        data = manifest = None
        if FILE_NAME in listing:
            data = self.hub.fetch(artifact, FILE_NAME, limit=strict_json.MAX_BYTES)
            manifest = Manifest.from_bytes(data, what=f"{FILE_NAME} of {artifact}")
            if manifest.artifact_id.key != artifact.key:
                raise MalformedFile(
                    "manifest.id", f"{artifact} has the {FILE_NAME} of {manifest.id}."
                )
        names = (
            [f.path for f in manifest.files] if manifest else [n for n in listing if is_payload(n)]
        )
        missing = [name for name in names if name not in listing]
        if missing or not names:
            what = ", ".join(missing) or "rotation files"
            raise ArtifactNotFound(
                f"{artifact} on {self.hub.title} has no {what}.",
                hint="the version is incomplete; tell its owner",
            )
        recipe, status = self.catalog.recipe(artifact.model), self.status(artifact)
        return ResolvedArtifact(
            id=artifact,
            hub=self.hub,
            files=tuple(sorted(listing[name] for name in names)),
            manifest_bytes=data,
            manifest=manifest,
            packaged=self.catalog.manifest(artifact),
            seen=self.catalog.seen(artifact),
            entry=self.index.entry(artifact),
            geometry=recipe.geometry if recipe else None,
            warnings=self._warnings(artifact, status),
            signature=listing.get(SIGNATURE_NAME),
        )

    def _warnings(self, artifact: ArtifactId, status: Status) -> tuple[str, ...]:
        entry = self.index.entry(artifact)
        sentences = [] if status.state == "active" else [status_sentence(artifact, status)]
        if entry is not None and "poor" in entry.accepted:
            sentences.append(f"{artifact.reference} {ACCEPTED['poor']}")
        return tuple(sentences)


def _signed(hub: Hub, data: bytes | None, trust: Trust) -> tuple[str | None, bytes | None]:
    """The key that signed the index `data` of `hub`, and the index.

    A folder is not read at one moment, so it is read again where its timestamp is of another index:
    somebody may be publishing."""
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
    """What a person should know about a version that is deprecated or yanked."""
    instead = f"; use {status.replaced_by}" if status.replaced_by else ""
    return f"{artifact.reference} is {status.state}: {status.reason or 'no reason given'}{instead}"
