"""One artifact on its way from a hub into the store: what is here already, what the hub offers and
what was promised about it, the files, hashed and verified, and the pin.

Bytes that fail verification, or that break a promise (see `trust`), never reach the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, computed_field

from oscar_zoo import errors
from oscar_zoo.artifact import durable, signature_file
from oscar_zoo.artifact.files import MAX_ARTIFACT_BYTES, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.outcome import (
    HIDDEN,
    Digest,
    Level,
    Sha256,
    SignatureReport,
    Verified,
    refuse,
    says,
)
from oscar_zoo.registry import pins
from oscar_zoo.registry.asking import explained, first_answer
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs.base import Hub, HubFile, Progress, in_parallel, is_commit
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.known_names import status_warnings
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.params import Signed
from oscar_zoo.registry.pins import Pin
from oscar_zoo.registry.signatures import (
    NOT_SIGNED,
    KnownKeys,
    check_signature,
    signature_of,
    unreadable,
)
from oscar_zoo.registry.store import Record, Store, StoredArtifact, find_installed
from oscar_zoo.registry.trust import Promise, Trust
from oscar_zoo.registry.view import HubView, ResolvedArtifact, find

T = TypeVar("T")
PARALLEL_FILES = 4
ABSENT: Any = Field(exclude_if=lambda value: value is None)
"""Of a field that the JSON has only where there is something to say."""


@dataclass(frozen=True)
class ListedFile:
    """A file of an artifact."""

    path: Annotated[str, says("Relative to the folder of the artifact, or to the root of the hub.")]
    size: Annotated[int, Field(ge=0, description="Bytes.")]
    sha256: Annotated[Sha256 | None, says("Null where the hub does not say.")]


@dataclass(frozen=True)
class PullResult:
    """An artifact that is in the store now."""

    artifact: Annotated[StoredArtifact, *HIDDEN]
    already_present: Annotated[bool, says("Whether nothing had to be fetched.")]
    first_use: Annotated[
        bool, says("Whether nobody had promised a digest, so that it is trusted from now on.")
    ]
    hub: Annotated[str, says("The hub that was asked, or that it came from.")]
    level: Annotated[Level | None, says("Null for an entry of an older version.")]
    warnings: Annotated[
        tuple[str, ...],
        says("Codes of verification, and sentences about the status of the version."),
    ] = ()
    notes: Annotated[tuple[str, ...], says("Remarks for people.")] = ()
    verified: Annotated[Verified | None, *HIDDEN] = None
    """The outcome, when the bytes were verified just now."""
    signature: SignatureReport = NOT_SIGNED
    pinned_by: Annotated[
        Path | None, says("The lock file that names it, so that no hub was asked; null otherwise.")
    ] = None
    computed: Annotated[bool, says("Whether it was computed now, because nobody had it.")] = False
    output: Annotated[
        Path | None, says("The folder that the files were copied to, with --output."), ABSENT
    ] = None
    files: Annotated[
        tuple[ListedFile, ...] | None,
        says("With --dry-run: what would be fetched, which is nothing."),
        ABSENT,
    ] = None
    bytes: Annotated[int | None, says("With --dry-run: bytes that would be fetched."), ABSENT] = (
        None
    )
    model: Annotated[
        str | None, says("Of a computed artifact: the model that was read."), ABSENT
    ] = None
    seconds: Annotated[
        Mapping[str, Annotated[float, Field(ge=0)]] | None,
        says("Of a computed artifact: duration by phase."),
        ABSENT,
    ] = None
    report: Annotated[Path | None, says("Of a computed artifact: its report."), ABSENT] = None
    moments: Annotated[
        Path | None, says("Of a computed artifact: its moments, for another fit."), ABSENT
    ] = None
    estimated_seconds: Annotated[
        float | None, says("Of a computed artifact: how long it was expected to take."), ABSENT
    ] = None

    @computed_field(description="Name of one version of an artifact: MODEL/TAG.")
    def id(self) -> str:
        return str(self.artifact.record.id)

    @computed_field
    def digest(self) -> Digest:
        return self.artifact.record.digest

    @computed_field(description="Its folder in the store.")
    def path(self) -> str:
        return str(self.artifact.record.path)

    @computed_field(description="Hub id of the model that it is for; null without a manifest.")
    def base_model(self) -> str | None:
        return self.artifact.manifest.model.id if self.artifact.manifest else None

    @computed_field(description="Commit of the hub.")
    def revision(self) -> str | None:
        return self.artifact.record.revision


@dataclass
class PullJob:
    """One pull: what is asked for, and its steps. With `prefer_installed` a copy in the store is
    taken without asking whether a hub has another; `refused` is one that lacks the signature which
    is required."""

    reference: Reference
    hubs: Sequence[Hub]
    store: Store
    _: KW_ONLY
    catalog: Catalog = field(default_factory=Catalog.packaged)
    trust: Trust = field(default_factory=Trust)
    signing: Signed = field(default_factory=Signed)
    offline: bool = False
    go_online: str = errors.WITHOUT_OPTION
    prefer_installed: bool = False
    progress: Progress | None = None
    refused: tuple[str, SignatureReport] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.pin = self.trust.pinned(self.reference, self.catalog)
        if self.trust.locked and self.pin is None:
            place = self.trust.lock.path if self.trust.lock else pins.LOCK_NAME
            raise errors.NotLocked.for_name(str(self.reference), place)

    def pull(self) -> PullResult:
        """Fetch, verify and store the artifact, or check the copy that is already there."""
        any_copy = self.offline or self.prefer_installed
        here = self._installed(any_copy)
        if here is not None:
            record, hub = here.artifact.record, self.pin.hub if self.pin else None
            self._pin_copy(record)
            status = status_warnings(record, self.catalog, ask=not any_copy, hub=hub)
            return replace(here, warnings=(*status, *here.warnings))
        self.store.check_owner()  # before a hub is asked
        with durable.held(durable.STORE, shared=True, timeout=30, root=self.store.root):
            try:
                result, notes = self._ask(self._obtain)
            except (errors.NetworkError, errors.NotFoundError) as error:
                if self.refused is not None:
                    what, signature = self.refused
                    signature.require(what)
                raise explained(error, self) from error.__cause__
        if self.pin is not None:  # a locked commit does not say what happened to it later
            record, hub = result.artifact.record, self.pin.hub
            status = status_warnings(record, self.catalog, ask=True, hub=hub)
            told = dict.fromkeys((*status, *result.warnings))
            result = replace(result, warnings=tuple(told))
        return replace(result, notes=notes)

    def plan(self) -> ResolvedArtifact | PullResult:
        """The installed copy that `pull` would take, or the offer it would fetch."""
        here = self._installed(self.offline)
        if here is not None:
            return here
        try:
            return self._ask(self._offer)[0]
        except (errors.NetworkError, errors.NotFoundError) as error:
            raise explained(error, self) from error.__cause__

    def copy(self) -> Record | None:
        """What the store has of it: exactly what is pinned, if anything is."""
        pin = self.pin
        if pin is None:
            return find_installed(self.reference, self.store, self.catalog)
        there = (one for one in self.store.installed() if one.id.key == pin.artifact_id.key)
        same = (one for one in there if pin.same_bytes(one.digest, one.manifest_sha256))
        return next(same, None)

    def _installed(self, any_copy: bool) -> PullResult | None:
        """The copy in the store, where no hub has to be asked."""
        pin = self.pin
        if pin is None and self.reference.digest is None and not any_copy:
            return None
        stored = self.store.intact(self.copy())
        if stored is None:
            return None
        signature = signature_of(stored, self.signing, self.trust.known.read())
        if not self._will_do(signature):
            self.refused = (stored.record.id.reference, signature)
            return None  # a hub may have a signature of it
        here = _present(stored, stored.record.source, signature)
        lock = self.trust.lock
        return here if pin is None or lock is None else replace(here, pinned_by=lock.path)

    def _pin_copy(self, record: Record) -> None:
        """Pin a copy that was taken without asking a hub, as it was pinned when it was fetched."""
        if self.pin is not None:
            return
        known = self.trust.known.read().pin(record.id)
        if known is None or not known.same_bytes(record.digest, record.manifest_sha256):
            source: pins.Source = "manifest" if record.manifest_sha256 else "listing"
            known = _pin(record, record.source, record.revision, source)
        self.trust.remember(known)

    def _ask(self, call: Callable[[Hub], T]) -> tuple[T, tuple[str, ...]]:
        """`call` of the first hub that answers, the hub of a pin first; and what others said."""
        hubs = tuple(self.hubs)
        if self.offline and not hubs:
            raise errors.OfflineError.for_name(str(self.reference), go_online=self.go_online)
        if self.pin is not None:
            home = [hub for hub in hubs if pins.same_hub(hub.name, self.pin.hub)]
            hubs = (*home, *(hub for hub in hubs if hub not in home))
        return first_answer(hubs, call, name=str(self.reference))

    def _offer(self, hub: Hub) -> ResolvedArtifact:
        pin = self.pin
        at_home = pin is not None and pins.same_hub(hub.name, pin.hub)
        if pin is not None and at_home and is_commit(pin.revision):
            with self._at_pinned_commit(hub):
                view = HubView(hub.at(str(pin.revision)), self.catalog, Index.empty())
                found = view.offer(pin.artifact_id)
        else:
            view = HubView.open(hub, self.catalog, trust=self.trust)
            found = find(self.reference, view) if pin is None else view.offer(pin.artifact_id)
        self._check(found, found.digest)
        return found

    @contextlib.contextmanager
    def _at_pinned_commit(self, hub: Hub) -> Iterator[None]:
        """A lock's commit may be gone only when its files are fetched: listings are kept."""
        try:
            yield
        except errors.RevisionNotFound as error:
            if self.pin is None:
                raise
            raise errors.RevisionGone(
                f"{hub.title} no longer has commit {str(self.pin.revision)[:12]}, which"
                f" {self.pin.id} is locked to.",
                hint="its history was rewritten; to lock what it offers now: --accept-new-digest",
            ) from error

    def _check(self, offer: ResolvedArtifact, digest: str | None) -> bool:
        """Hold `digest` against everything promised before; whether anybody promised anything."""
        promised = self.trust.promises(offer.id, entry=offer.entry, packaged=offer.packaged_promise)
        promises = [*promised]
        if (copy := self.store.find(offer.id)) is not None:
            by = f"the copy stored on {copy.fetched[:10]}"
            promises.append(Promise(copy.digest, copy.manifest_sha256, by))
        self.trust.check(offer.id, digest, offer.manifest_sha256, of=promises, hub=offer.hub.title)
        return bool(promises)

    def _obtain(self, hub: Hub) -> PullResult:
        """Take what `hub` offers into the store, unless the same bytes are there, and pin it."""
        offer = self._offer(hub)
        view = offer.view
        revision = offer.hub.revision if view.is_remote else None
        with durable.held(f"pull {offer.id.key}", root=self.store.root):
            known = self.store.find(offer.id)
            same = (
                known is not None
                and offer.digest in (None, known.digest)
                and offer.manifest_sha256 == known.manifest_sha256
            )
            stored = self.store.intact(known if same else None)
            seen = self.trust.known.read().with_index(hub.name, 0, view.key)
            signature = None if stored is None else signature_of(stored, self.signing, seen)
            if stored and signature and self._will_do(signature):
                if signature.state != "valid" or view.key == seen.key_of(stored.record.source):
                    stored = self.store.told(stored, **_said(offer, revision))
                result = _present(stored, hub.name, signature, offer.warnings)
            else:
                with self._at_pinned_commit(hub):
                    result = self._download(offer, revision)
            self.store.keep_only(result.artifact.record)
            pin = _pin(result.artifact.record, offer.hub.name, revision, _promised_by(offer))
            self.trust.remember(pin, hub=offer.hub.name, index=view.index, key=view.key)
        return result

    def _download(self, offer: ResolvedArtifact, revision: str | None) -> PullResult:
        payload = fetch_files(offer, self.progress)
        beside = {} if offer.manifest_bytes is None else {FILE_NAME: offer.manifest_bytes}
        files = payload | beside
        signature, data = self._fetched_signature(offer, files)
        verified = verify_payload(offer, payload)
        # A listing without digests promised nothing before; promises must hold for the bytes
        # themselves.
        promised = self._check(offer, verified.digest)
        wanted = self.reference.digest
        if wanted is not None and not verified.digest.startswith(wanted):
            raise errors.DigestMismatchError.for_content(
                str(offer.id), want=wanted, got=verified.digest
            )
        if data is not None:
            files[SIGNATURE_NAME] = data
        facts: Any = {"level": verified.level, "warnings": verified.warnings}
        artifact = self.store.put(offer.id, files, **facts, **_said(offer, revision))
        return PullResult(
            artifact,
            False,
            offer.manifest is None and not promised,
            offer.hub.name,
            verified.level,
            (*offer.warnings, *_remarks(offer.id, signature), *verified.warnings),
            verified=verified,
            signature=signature,
        )

    def _fetched_signature(
        self, offer: ResolvedArtifact, files: dict[str, bytes]
    ) -> tuple[SignatureReport, bytes | None]:
        """The signature of fetched files, which nothing has parsed yet."""
        data = None
        try:
            data = fetch_signature(offer)
            hub, key = offer.hub.name, offer.view.key or self.trust.key_of(offer.hub.name)
            report = check_signature(data, files, KnownKeys.gather(self.signing.keys, {hub: key}))
        except errors.MalformedFile as error:
            report = unreadable(error)
        if self.signing.require_signature:
            report.require(f"{offer.id.reference} on {offer.hub.title}")
        return report, data

    def _will_do(self, signature: SignatureReport) -> bool:
        return signature.state == "valid" or not self.signing.require_signature


def fetch_files(offer: ResolvedArtifact, progress: Progress | None = None) -> dict[str, bytes]:
    """The payload, every file as its hub lists it."""
    size = sum(file.size for file in offer.files)
    if size > MAX_ARTIFACT_BYTES:
        text = f"{offer.id} has {size} bytes, at most {MAX_ARTIFACT_BYTES} are fetched."
        raise errors.MalformedFile("file.size", text)
    calls = [partial(_fetch, offer, file, progress) for file in offer.files]
    bodies = in_parallel(calls, workers=PARALLEL_FILES)
    return {file.path: data for file, data in zip(offer.files, bodies, strict=True)}


def fetch_signature(offer: ResolvedArtifact) -> bytes | None:
    file = offer.signature
    if file is None:
        return None
    if file.size > signature_file.MAX_BYTES:
        raise errors.MalformedFile(
            "file.size",
            f"{file.path} of {offer.id} has {file.size:,} bytes, at most"
            f" {signature_file.MAX_BYTES:,} are read.",
        )
    return _fetch(offer, file, None)


def verify_payload(offer: ResolvedArtifact, payload: dict[str, bytes]) -> Verified:
    # numpy: a pull of what is here already does without
    from oscar_zoo.artifact.verify import verify_files

    outcome = verify_files(
        payload,
        manifest=offer.manifest,
        expected=offer.packaged.file_digests if offer.packaged else None,
        geometry=offer.geometry,
        name_hint=str(offer.id),
    )
    if not isinstance(outcome, Verified):
        refuse(str(offer.id), outcome)
    return outcome


def _fetch(offer: ResolvedArtifact, file: HubFile, progress: Progress | None) -> bytes:
    data = offer.hub.fetch(offer.id, file.path, limit=file.size, progress=progress)
    got = sha256_hex(data)
    if len(data) == file.size and file.sha256 in (None, got):
        return data
    want = file.sha256 or f"{file.size} bytes"
    seen = got if file.sha256 else f"{len(data)} bytes"
    what = f"{file.path} of {offer.id} on {offer.hub.title}"
    raise errors.DigestMismatchError.for_content(what, want=want, got=seen)


def _said(offer: ResolvedArtifact, revision: str | None) -> dict[str, Any]:
    """What a record has of the hub and of its index."""
    said, entry = {"source": offer.hub.name, "revision": revision}, offer.entry
    made = entry.summary.measured if entry and entry.summary else None
    measured = Measured.best(entry.scores, made) if entry else None
    return said | {"accepted": entry.accepted if entry else (), "measured": measured}


def _present(
    stored: StoredArtifact, hub: str, signature: SignatureReport, warnings: tuple[str, ...] = ()
) -> PullResult:
    record = stored.record
    level: Any = record.level
    warnings = (*warnings, *_remarks(record.id, signature), *record.warnings)
    return PullResult(stored, True, False, hub, level, warnings, signature=signature)


def _remarks(artifact: ArtifactId, signature: SignatureReport) -> tuple[str, ...]:
    if signature.state != "invalid":
        return ()
    return (f"{artifact.reference} {signature.message}",)


def _pin(record: Record, hub: str, revision: str | None, source: pins.Source) -> Pin:
    return Pin(
        id=str(record.id),
        digest=record.digest,
        files=record.files,
        manifest_sha256=record.manifest_sha256,
        hub=hub,
        revision=revision,
        first_seen=pins.now(),
        source=source,
    )


def _promised_by(offer: ResolvedArtifact) -> pins.Source:
    if offer.entry is not None:
        return "index"
    if offer.manifest is not None:
        return "manifest"
    return "content" if offer.digest is None else "listing"
