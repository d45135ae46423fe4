"""Use case: an artifact of a hub -> a verified entry of the store.

Every file is hashed as it arrives and again whenever it is used. A hub that now offers other bytes under a known id is
an error that shows both digests; bytes that fail verification never reach the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from oscar_zoo.artifact.digest import FileDigest, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.outcome import Failure, Outcome, Verified, why
from oscar_zoo.artifact.verify import MAX_ARTIFACT_BYTES, verify_files
from oscar_zoo.errors import DigestMismatchError, MalformedFile, VerificationFailed
from oscar_zoo.hubs.base import Hub, HubFile, Progress
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.record import Record
from oscar_zoo.registry.resolve import ResolvedArtifact, resolve
from oscar_zoo.registry.store import Store, StoredArtifact


@dataclass(frozen=True)
class PullResult:
    """What `pull` did.

    Attributes:
        artifact: the entry in the store, hashed just now.
        verified: the outcome of verification of exactly those bytes.
        already_present: nothing was fetched; the entry was there and intact.
        first_use: nobody had promised a digest (no manifest, no known checksum): it is trusted from now on.
        resolved: what the hub offered.
    """

    artifact: StoredArtifact
    verified: Verified
    already_present: bool
    first_use: bool
    resolved: ResolvedArtifact


def pull(
    reference: Reference | str,
    hub: Hub,
    store: Store,
    *,
    catalog: Catalog | None = None,
    accept_new: bool = False,
    progress: Progress | None = None,
) -> PullResult:
    """Fetch, verify and store an artifact, or check the copy that is already there.

    Args:
        reference: what to pull; see `resolve`.
        hub: where from.
        store: where to.
        catalog: recipes and manifests; default the packaged ones.
        accept_new: replace a stored copy when the hub offers other bytes now.
        progress: told about bytes fetched.

    Raises:
        NotFoundError, AmbiguousName: see `resolve`.
        DigestMismatchError: the hub's bytes differ from its listing, or from what was stored before.
        MalformedFile: the hub lists more bytes than any artifact has.
        VerificationFailed: the bytes must not be used; `error.outcome` says why.
        StorageError: the disk refused.
    """
    reference = Reference.parse(reference) if isinstance(reference, str) else reference
    resolved = resolve(reference, hub, catalog)
    known = store.find(resolved.id)
    if known is not None and not accept_new:
        _refuse_change(resolved, known)
    stored = _open_intact(store, known) if known and _same(resolved, known) else None
    if stored is not None:
        verified = _verify(resolved, stored.payload)
        return PullResult(stored, verified, True, False, resolved)
    files = _fetch_all(hub, resolved, progress)
    verified = _verify(resolved, files)
    # A listing without digests promised nothing before; what is known must hold for the bytes themselves.
    for want in (reference.digest, known.digest if known and not accept_new else None):
        if want and not verified.digest.startswith(want):
            raise DigestMismatchError.for_content(str(resolved.id), want=want, got=verified.digest)
    if resolved.manifest_bytes is not None:
        files[FILE_NAME] = resolved.manifest_bytes
    artifact = store.put(resolved.id, files, source=hub.name)
    if known is not None and known.path != artifact.record.path:
        store.remove(known)
    first_use = resolved.manifest is None and resolved.expected_digest is None
    return PullResult(artifact, verified, False, first_use, resolved)


def verify_stored(artifact: StoredArtifact, catalog: Catalog | None = None) -> Outcome:
    """Verify an entry that `Store.open` returned, with the geometry the zoo knows for its model."""
    recipe = (catalog or Catalog.packaged()).recipe(artifact.record.id.model)
    return verify_files(
        artifact.payload,
        manifest=artifact.manifest,
        expected=artifact.record.files,
        geometry=recipe.geometry if recipe else None,
        name_hint=str(artifact.record.id),
    )


def refuse(name: str, outcome: Failure) -> NoReturn:
    """Raise the error for an outcome that is not `Verified`.

    Raises:
        VerificationFailed: always.
    """
    raise VerificationFailed(
        f"{name} failed verification: {why(outcome)}.",
        hint=f"do not use this copy; details: oscar-zoo verify {name}",
        outcome=outcome,
    )


def _open_intact(store: Store, record: Record) -> StoredArtifact | None:
    """The stored copy, or `None` when it rotted; its record stays, which says what the hub must offer."""
    try:
        return store.open(record.digest, record.id)
    except (DigestMismatchError, MalformedFile):
        return None


def _same(resolved: ResolvedArtifact, known: Record) -> bool:
    manifest = sha256_hex(resolved.manifest_bytes) if resolved.manifest_bytes is not None else None
    return resolved.digest in (None, known.digest) and manifest == known.manifest_sha256


def _refuse_change(resolved: ResolvedArtifact, known: Record) -> None:
    if _same(resolved, known):
        return
    if resolved.digest not in (None, known.digest):
        what, want, got = str(resolved.id), known.digest, resolved.digest
    else:
        offered = sha256_hex(resolved.manifest_bytes) if resolved.manifest_bytes is not None else "no file"
        what, want, got = f"{FILE_NAME} of {resolved.id}", known.manifest_sha256 or "no file", offered
    raise DigestMismatchError(
        f"{what} changed: {want} was stored on {known.fetched[:10]}, the hub now offers {got}.",
        hint="versions never change; ask the publisher, or accept the new bytes with --accept-new-digest",
    )


def _fetch_all(hub: Hub, resolved: ResolvedArtifact, progress: Progress | None) -> dict[str, bytes]:
    size = sum(file.size for file in resolved.files)
    if size > MAX_ARTIFACT_BYTES:
        raise MalformedFile("file.size", f"{resolved.id} has {size} bytes, at most {MAX_ARTIFACT_BYTES} are fetched.")
    return {file.path: _fetch(hub, resolved, file, progress) for file in resolved.files}


def _fetch(hub: Hub, resolved: ResolvedArtifact, file: HubFile, progress: Progress | None) -> bytes:
    """One file as listed. A copy that differs is fetched once more from the same hub, then refused."""
    for _ in range(2):
        data = hub.fetch(resolved.id, file.path, limit=file.size, progress=progress)
        got = sha256_hex(data)
        if len(data) == file.size and file.sha256 in (None, got):
            return data
    raise DigestMismatchError.for_content(
        f"{file.path} of {resolved.id} on {hub.name}", want=file.sha256 or f"{file.size} bytes", got=got
    )


def _verify(resolved: ResolvedArtifact, payload: dict[str, bytes]) -> Verified:
    outcome = verify_files(
        payload,
        manifest=resolved.manifest,
        expected=_promised(resolved),
        geometry=resolved.geometry,
        name_hint=str(resolved.id),
    )
    if not isinstance(outcome, Verified):
        refuse(str(resolved.id), outcome)
    return outcome


def _promised(resolved: ResolvedArtifact) -> Sequence[FileDigest] | None:
    """Checksums this package promises for the artifact, or `None`."""
    return resolved.packaged.file_digests if resolved.packaged else None
