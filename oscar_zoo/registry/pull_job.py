"""The steps of one pull: what is here already, what a hub offers and what was promised about it,
and the files on their way into the store.

Bytes that fail verification, or that break a promise (see `trust`), never reach the store.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.outcome import SignatureReport, Verified
from oscar_zoo.errors import (
    DigestMismatchError,
    MalformedFile,
    NotLocked,
    RevisionGone,
    RevisionNotFound,
)
from oscar_zoo.registry import pins, trust
from oscar_zoo.registry.catalog import Catalog, PayloadFile
from oscar_zoo.registry.fetch import fetch_files, fetch_signature, verify_payload
from oscar_zoo.registry.hubs.base import Hub, Progress
from oscar_zoo.registry.index import Index, IndexEntry
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.pins import Pin
from oscar_zoo.registry.resolve import find, first_answer
from oscar_zoo.registry.signatures import (
    NOT_SIGNED,
    KnownKeys,
    SignatureWish,
    check_signature,
    unreadable,
)
from oscar_zoo.registry.store import EntryOrigin, Record, Store, StoredArtifact, find_installed
from oscar_zoo.registry.trust import Promise, Trust
from oscar_zoo.registry.view import HubView, ResolvedArtifact

T = TypeVar("T")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class PullResult:
    """What `pull` did.

    Attributes:
        artifact: the entry in the store, hashed just now.
        already_present: nothing was fetched; the entry was there and intact.
        first_use: nobody had promised a digest: it is trusted from now on.
        hub: the hub that was asked, or the one the entry came from when none was.
        level: what verification reached, now or before the entry was stored.
        warnings: codes of verification and sentences about the status of the version.
        notes: what went wrong with hubs asked before.
        verified: the outcome when the bytes were verified just now.
        signature: what is known about the signature of the entry.
        pinned_by: the lock file that names the entry, so that no hub was asked; `None` otherwise.
    """

    artifact: StoredArtifact
    already_present: bool
    first_use: bool
    hub: str
    level: str | None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    verified: Verified | None = None
    signature: SignatureReport = NOT_SIGNED
    pinned_by: Path | None = None


class PullJob:
    """One pull: the arguments, made complete, and its steps.

    `refused` is a copy in the store that lacks a valid signature, where one is required.
    """

    def __init__(
        self,
        reference: Reference,
        hubs: Hub | Sequence[Hub],
        store: Store,
        catalog: Catalog | None,
        trust: Trust | None,
        progress: Progress | None,
        signing: SignatureWish | None = None,
    ) -> None:
        self.reference, self.signing = reference, signing or SignatureWish()
        self.hubs = tuple(hubs) if isinstance(hubs, Sequence) else (hubs,)
        self.store, self.progress = store, progress
        self.refused: tuple[str, SignatureReport] | None = None
        self.catalog = catalog or Catalog.packaged()
        self.trust = trust or Trust()
        self.pin = self.trust.pinned(self.reference, self.catalog)
        if self.trust.locked and self.pin is None:
            place = self.trust.lock.path if self.trust.lock else pins.LOCK_NAME
            raise NotLocked.for_name(str(self.reference), place)

    def installed(self, any_copy: bool) -> PullResult | None:
        """The copy in the store, where no hub has to be asked: pinned, named by its digest, or
        `any_copy` will do."""
        pin = self.pin
        if pin is not None:
            found = [
                r
                for r in self.store.installed()
                if r.id.key == pin.artifact_id.key and r.digest == pin.digest
            ]
            record = (
                found[0]
                if found and pin.same_bytes(found[0].digest, found[0].manifest_sha256)
                else None
            )
        elif any_copy or self.reference.digest is not None:
            record = find_installed(self.reference, self.store, self.catalog)
        else:
            return None
        stored = self.store.intact(record)
        if stored is None:
            return None
        signature = self._signed(stored, stored.record.source)
        if self.signing.required and signature.state != "valid":
            self.refused = (stored.record.id.reference, signature)
            return None  # a hub may have a signature of it
        here = _present(stored, stored.record.source, signature=signature)
        lock = self.trust.lock
        return here if pin is None or lock is None else replace(here, pinned_by=lock.path)

    def remember_copy(self, record: Record) -> None:
        """Pin a copy that was taken without asking a hub, as it was pinned when it was fetched."""
        if self.pin is None:
            known = self.trust.known.read().pin(record.id)
            same = known is not None and known.same_bytes(record.digest, record.manifest_sha256)
            source: pins.Source = "manifest" if record.manifest_sha256 else "listing"
            self.trust.remember(
                known if known and same else _pin(record, record.source, record.revision, source)
            )

    def ask(self, call: Callable[[Hub], T]) -> tuple[T, tuple[str, ...]]:
        """`call` of the first hub that answers; the hub of a pin first, at its commit."""
        hubs = self.hubs
        if self.pin is not None:
            home = [hub for hub in hubs if pins.same_hub(hub.name, self.pin.hub)]
            hubs = (*home, *(hub for hub in hubs if hub not in home))
        return first_answer(hubs, call, name=str(self.reference))

    def offer(self, hub: Hub) -> Offer:
        """What `hub` offers, its listing already held against every promise."""
        pin = self.pin
        if (
            pin is not None
            and pins.same_hub(hub.name, pin.hub)
            and _COMMIT.fullmatch(pin.revision or "")
        ):
            return self._pinned_offer(hub.at(str(pin.revision)), pin)
        view = HubView.open(hub, self.catalog, trust=self.trust)
        resolved = find(self.reference, view) if pin is None else view.offer(pin.artifact_id)
        return self._checked(view, resolved)

    def obtain(self, hub: Hub) -> PullResult:
        """Take what `hub` offers into the store, unless the same bytes are there."""
        offer = self.offer(hub)
        with durable.held(f"pull {offer.resolved.id.key}", root=self.store.root):
            known = self.store.find(offer.resolved.id)
            same = known if known and _same(offer.resolved, known) else None
            stored = self.store.intact(same)
            signature = stored and self._signed(stored, hub.name, offer.view.key)
            kept = signature and (signature.state == "valid" or not self.signing.required)
            if stored and signature and kept:
                warnings = offer.resolved.warnings
                result = _present(stored, hub.name, warnings, signature=signature)
            else:
                with self._at_pinned_commit(hub):
                    result = self._download(offer)
            self.store.keep_only(result.artifact.record)
            self._remember(offer, result)
        return result

    def _pinned_offer(self, hub: Hub, pin: Pin) -> Offer:
        with self._at_pinned_commit(hub):
            view = HubView(hub, self.catalog, Index.empty())
            return self._checked(view, view.offer(pin.artifact_id))

    @contextlib.contextmanager
    def _at_pinned_commit(self, hub: Hub) -> Iterator[None]:
        """A lock's commit may be gone when it is listed, or only when its files are fetched, since
        listings are kept."""
        try:
            yield
        except RevisionNotFound as error:
            if self.pin is None:
                raise
            raise RevisionGone(
                f"{hub.title} no longer has commit {str(self.pin.revision)[:12]}, which"
                f" {self.pin.id} is locked to.",
                hint="its history was rewritten; to lock what it offers now: --accept-new-digest",
            ) from error

    def _checked(self, view: HubView, resolved: ResolvedArtifact) -> Offer:
        promises = tuple(
            self.trust.promises(
                resolved.id, entry=resolved.entry, packaged=resolved.packaged_promise
            )
        )
        known = self.store.find(resolved.id)
        if known is not None:
            promises = (*promises, trust.of_record(known))
        offer = Offer(view, resolved, promises)
        self._check(offer, resolved.digest)
        return offer

    def _check(self, offer: Offer, digest: str | None) -> None:
        resolved = offer.resolved
        self.trust.check(
            resolved.id,
            digest,
            resolved.manifest_sha256,
            of=offer.promises,
            hub=offer.view.hub.title,
        )

    def _download(self, offer: Offer) -> PullResult:
        resolved = offer.resolved
        files = fetch_files(resolved, self.progress)
        if resolved.manifest_bytes is not None:
            files[FILE_NAME] = resolved.manifest_bytes
        signature, data = self._signature(offer, files)
        payload = {name: content for name, content in files.items() if name != FILE_NAME}
        verified = verify_payload(resolved, payload)
        # A listing without digests promised nothing before; promises must hold for the bytes
        # themselves.
        self._check(offer, verified.digest)
        wanted = self.reference.digest
        if wanted is not None and not verified.digest.startswith(wanted):
            raise DigestMismatchError.for_content(
                str(resolved.id), want=wanted, got=verified.digest
            )
        if data is not None:
            files[SIGNATURE_NAME] = data
        origin = EntryOrigin(
            resolved.hub.revision if offer.view.is_remote else None,
            verified.level,
            verified.warnings,
            *_quality(resolved.entry),
        )
        artifact = self.store.put(resolved.id, files, source=resolved.hub.name, origin=origin)
        first_use = resolved.manifest is None and not offer.promises
        warnings = (*resolved.warnings, *_remarks(resolved.id, signature), *verified.warnings)
        return PullResult(
            artifact,
            False,
            first_use,
            resolved.hub.name,
            verified.level,
            warnings,
            verified=verified,
            signature=signature,
        )

    def _signature(
        self, offer: Offer, files: dict[str, bytes]
    ) -> tuple[SignatureReport, bytes | None]:
        """What is known about the signature of fetched files, which nothing has parsed yet, and the
        signature file.
        """
        data = None
        try:
            data = fetch_signature(offer.resolved)
            report = check_signature(
                data, files, self._keys(offer.resolved.hub.name, offer.view.key)
            )
        except MalformedFile as error:
            report = unreadable(error)
        if self.signing.required:
            report.require(f"{offer.resolved.id.reference} on {offer.view.hub.title}")
        return report, data

    def _signed(self, stored: StoredArtifact, hub: str, key: str | None = None) -> SignatureReport:
        return check_signature(stored.signature, stored.signed_files, self._keys(hub, key))

    def _keys(self, hub: str, key: str | None) -> KnownKeys:
        """What is known for artifacts of `hub`, whose index is signed with `key`, or is not read
        now."""
        return KnownKeys.gather(self.signing.keys, {hub: key or self.trust.key_of(hub)})

    def _remember(self, offer: Offer, result: PullResult) -> None:
        hub = offer.resolved.hub
        revision = hub.revision if offer.view.is_remote else None
        pin = _pin(result.artifact.record, hub.name, revision, _source(offer.resolved))
        self.trust.remember(pin, hub=hub.name, index=offer.view.index, key=offer.view.key)


@dataclass(frozen=True)
class Offer:
    """An offer of a hub and everything promised about it before."""

    view: HubView
    resolved: ResolvedArtifact
    promises: tuple[Promise, ...]


def _present(
    stored: StoredArtifact,
    hub: str,
    warnings: tuple[str, ...] = (),
    *,
    signature: SignatureReport,
) -> PullResult:
    record = stored.record
    warnings = (*warnings, *_remarks(record.id, signature), *record.warnings)
    return PullResult(stored, True, False, hub, record.level, warnings, signature=signature)


def _remarks(artifact: ArtifactId, signature: SignatureReport) -> tuple[str, ...]:
    """A sentence about a signature that is there and is not valid."""
    if signature.state != "invalid":
        return ()
    return (f"{artifact.reference} {signature.message}",)


def _pin(record: Record, hub: str, revision: str | None, source: pins.Source) -> Pin:
    return Pin(
        id=str(record.id),
        digest=record.digest,
        files=tuple(PayloadFile(path=f.path, sha256=f.sha256, size=f.size) for f in record.files),
        manifest_sha256=record.manifest_sha256,
        hub=hub,
        revision=revision,
        first_seen=pins.now(),
        source=source,
    )


def _same(resolved: ResolvedArtifact, known: Record) -> bool:
    return (
        resolved.digest in (None, known.digest)
        and resolved.manifest_sha256 == known.manifest_sha256
    )


def _source(resolved: ResolvedArtifact) -> pins.Source:
    if resolved.entry is not None:
        return "index"
    if resolved.manifest is not None:
        return "manifest"
    return "content" if resolved.digest is None else "listing"


def _quality(entry: IndexEntry | None) -> tuple[tuple[str, ...], Measured | None]:
    """What an index says about the quality of an artifact, to know it without the hub."""
    if entry is None:
        return (), None
    made = entry.summary.measured if entry.summary else None
    return entry.accepted, Measured.best(entry.scores, made)
