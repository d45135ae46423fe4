"""Who signed an artifact: its signature file held against its bytes and against known keys.

A key is known when the user names it, when the hub of the artifact signs its index with it (which
is pinned on first use), or when it is shipped with the package. A signature decides nothing unless
it is required; it is shown, and what is wrong with it is a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

from oscar_zoo.artifact import signature_file
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.outcome import Check, Outcome, Rejected, SignatureReport, State, Verified
from oscar_zoo.artifact.signature_file import SignatureFile
from oscar_zoo.errors import MalformedFile, MissingDependency
from oscar_zoo.registry import signing_key, trust
from oscar_zoo.registry.catalog import packaged_keys
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.signing_key import SigningKey
from oscar_zoo.registry.store import StoredArtifact


@dataclass(frozen=True)
class SignatureWish:
    """What is asked of signatures.

    Attributes:
        required: whether an artifact without a valid signature of a known key is refused.
    """

    required: bool = False
    keys: tuple[Path, ...] = ()


@dataclass(frozen=True)
class KnownKey:
    """A key that is known.

    Attributes:
        by: who vouches for it, for people.
        public: the key as DER, or `None` where only its fingerprint is known.
        until: when it is no longer trusted, or `None`.
    """

    fingerprint: str
    by: str
    public: bytes | None = None
    until: datetime | None = None


@dataclass(frozen=True)
class KnownKeys:
    """Every key that is known for one artifact."""

    keys: tuple[KnownKey, ...] = ()

    @classmethod
    def gather(
        cls, files: Iterable[Path] = (), pinned: Mapping[str, str | None] | None = None
    ) -> Self:
        """The keys in `files`, those pinned for hubs, and those of the package."""
        named = [(signing_key.public_key_of_file(path), f"--key {path}") for path in files]
        keys = [KnownKey(signing_key.fingerprint(public), by, public) for public, by in named]
        for hub, mark in (pinned or {}).items():
            if mark is not None:
                keys.append(KnownKey(mark, f"the key of {hub}"))
        for row in packaged_keys().keys:
            mark, by = signing_key.fingerprint(row.public), f"shipped with oscar-zoo: {row.owner}"
            keys.append(KnownKey(mark, by, row.public, row.until))
        return cls(tuple(keys))

    def of(self, found: SignatureFile) -> tuple[bytes | None, tuple[KnownKey, ...]]:
        """The public key that `found` claims, where it can be had, and who knows it."""
        public = found.key
        for key in self.keys:
            hint = None if key.public is None else signing_key.pem_hint(key.public)
            if public is None and hint is not None and hint == found.hint:
                public = key.public
        mark = None if public is None else signing_key.fingerprint(public)
        return public, tuple(key for key in self.keys if key.fingerprint == mark)


NOT_SIGNED = SignatureReport("missing", code="signature.missing", message="is not signed")
"""The report of an artifact without a signature file."""


def check_signature(
    data: bytes | None,
    files: Mapping[str, bytes],
    keys: KnownKeys,
    *,
    others: Collection[str] = (),
) -> SignatureReport:
    """Hold a signature file against the files of an artifact and against known keys."""
    if data is None:
        return NOT_SIGNED
    try:
        found = SignatureFile.from_bytes(data)
    except MalformedFile as error:
        return unreadable(error)
    public, known = keys.of(found)
    mark = None if public is None else signing_key.fingerprint(public)
    if (wrong := _difference(found.files, files, others)) is not None:
        return _invalid(*wrong, mark)
    if public is None or mark is None:
        message = f"is signed by a key that is not known here (hint {(found.hint or 'none')[:16]})"
        return SignatureReport("unknown_key", None, None, "signature.unknown_key", message)
    try:
        signed = signing_key.has_signed(public, found.signature, found.signed_bytes)
    except MissingDependency:
        text = "has a signature that is not checked: pip install 'oscar-zoo[sign]'"
        return SignatureReport("not_checked", mark, None, "signature.not_checked", text)
    if not signed or found.hint not in (None, signing_key.pem_hint(public)):
        return _invalid("invalid", "has a signature that is none of its key", mark)
    return _by_known(mark, known)


def unreadable(error: MalformedFile) -> SignatureReport:
    """The report of a signature file that broke a rule of its format."""
    message = f"has a signature that cannot be read: {error.message}".rstrip(".")
    return _invalid("format", message)


def sign(artifact: str, files: Mapping[str, bytes], key: SigningKey) -> bytes:
    """The signature file of an artifact."""
    digests = {path: sha256_hex(content) for path, content in files.items()}
    payload = signature_file.statement_bytes(artifact, digests, key.public)
    signature = key.sign(signature_file.pre_authentication(payload))
    return signature_file.bundle_bytes(payload, signature, signing_key.pem_hint(key.public))


def _by_known(mark: str, known: tuple[KnownKey, ...]) -> SignatureReport:
    now = trust.now()
    for key in known:
        if key.until is None or key.until >= now:
            return SignatureReport("valid", mark, key.by)
    if known:
        until = f"{known[0].until:%Y-%m-%d}"
        message = f"is signed by {mark[:16]}, a key that was trusted until {until}"
        return _invalid("expired", message, mark)
    message = f"is signed by {mark[:16]}, a key that is not known here"
    return SignatureReport("unknown_key", mark, None, "signature.unknown_key", message)


def _difference(
    signed: Mapping[str, str], files: Mapping[str, bytes], others: Collection[str]
) -> tuple[str, str] | None:
    """How the files of an artifact differ from those that were signed: a code and a clause."""
    got = {path: sha256_hex(content) for path, content in files.items()}
    if signed.get(FILE_NAME) != got.get(FILE_NAME):
        return "changed_manifest", f"has an {FILE_NAME} that is not the signed one"
    for path in sorted(signed.keys() & got.keys()):
        if signed[path] != got[path]:
            return "changed_file", f"has a {path} that is not the signed one"
    if missing := sorted(signed.keys() - got.keys() - set(others)):
        return "missing_file", f"lacks {missing[0]}, which is signed"
    if more := sorted((got.keys() | set(others)) - signed.keys()):
        return "added_file", f"has {more[0]}, which is not among the signed files"
    return None


def _invalid(code: str, message: str, mark: str | None = None) -> SignatureReport:
    return SignatureReport("invalid", mark, None, f"signature.{code}", message)


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
