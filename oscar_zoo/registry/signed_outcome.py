"""Signatures where artifacts are verified: found in a folder or in the store, and told beside the
other checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.outcome import Check, Outcome, Rejected, SignatureReport, State, Verified
from oscar_zoo.errors import MalformedFile
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.signatures import (
    KnownKeys,
    SignatureWish,
    check_signature,
    unreadable,
)
from oscar_zoo.registry.store import StoredArtifact


def with_signature(
    verify: Callable[[], Outcome], signature: SignatureReport | None, signing: SignatureWish
) -> Outcome:
    """The outcome of `verify`, with a line about the signature where there is one; where one is
    required and not valid, nothing of the artifact is parsed."""
    if signature is None:
        return verify()
    if signing.required and signature.state != "valid":
        message = f"the artifact {signature.message}"
        failed = Check("signature", "failed", message)
        return Rejected("signature", str(signature.code), message, checks=(failed,))
    outcome = verify()
    if not isinstance(outcome, Verified) or not signature.is_there:
        return outcome
    state: State = "ok" if signature.state == "valid" else "warning"
    state = "not checked" if signature.state == "not_checked" else state
    line = Check("signature", state, signature.sentence)
    return replace(outcome, checks=(*outcome.checks, line))


def signature_of(stored: StoredArtifact, signing: SignatureWish | None = None) -> SignatureReport:
    """What is known about the signature of an entry of the store."""
    hub, files = stored.record.source, signing.keys if signing else ()
    keys = KnownKeys.gather(files, {hub: PinFile.known().read().key_of(hub)})
    return check_signature(stored.signature, stored.signed_files, keys)


def signature_in(folder: Path, files: dict[str, bytes], signing: SignatureWish) -> SignatureReport:
    """What is known about the signature in an artifact's folder."""
    from oscar_zoo.artifact.artifact_folder import other_files, read_signature

    try:
        data = read_signature(folder)
        others = [] if data is None else other_files(folder, files.keys())
    except MalformedFile as error:
        return unreadable(error)
    manifest = Manifest.readable(files.get(FILE_NAME))
    known, pin = PinFile.known().read(), None
    if data is not None and manifest is not None:
        pin = known.pin(manifest.artifact_id)
    pinned = {} if pin is None else {pin.hub: known.key_of(pin.hub)}
    return check_signature(data, files, KnownKeys.gather(signing.keys, pinned), others=others)
