"""Who signed an artifact, and the elliptic keys on the curve P-256 that sign what a hub says; the
keys need `oscar-zoo[sign]`.

A private key is a PEM file without a password, which only its owner may read:

    openssl ecparam -name prime256v1 -genkey -noout -out zoo.pem

The signature file of an artifact is held against its bytes and against known keys. A key is known
when the user names it, when the hub of the artifact signs its index with it (which is pinned on
first use), or when it is shipped with the package. A signature decides nothing unless it is
required; it is shown, and what is wrong with it is a remark.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from oscar_zoo.artifact import signature_file
from oscar_zoo.artifact.files import read_file, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.outcome import Check, Outcome, Rejected, SignatureReport, State, Verified
from oscar_zoo.artifact.signature_file import SignatureFile
from oscar_zoo.errors import MalformedFile, MissingDependency, UsageError
from oscar_zoo.registry.catalog import packaged_keys
from oscar_zoo.registry.params import Signed
from oscar_zoo.registry.pins import PinFile, Pins
from oscar_zoo.registry.store import StoredArtifact

VARIABLE = "OSCAR_ZOO_SIGN_KEY"
"""Names the file of the private key, for every command that writes an index."""
MAX_BYTES = 1 << 14


def now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class SigningKey:
    """A private key; `public` is its public key as DER (`SubjectPublicKeyInfo`)."""

    public: bytes
    _private: Any

    @classmethod
    def configured(cls) -> Self | None:
        name = os.environ.get(VARIABLE, "").strip()
        return cls.of_file(Path(name).expanduser()) if name else None

    @classmethod
    def of_file(cls, path: Path) -> Self:
        crypto = _library()
        data = read_file(path, max_bytes=MAX_BYTES)
        if path.stat().st_mode & 0o077:
            raise UsageError(f"others than you may read the key {path}.", hint=f"chmod 600 {path}")
        try:
            private = crypto.serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError):
            private = None
        if not _is_p256(crypto, private):
            raise UsageError(
                f"{path} holds no private key of the curve P-256 without a password.",
                hint="openssl ecparam -name prime256v1 -genkey -noout -out zoo.pem",
            )
        return cls(_der(crypto, private.public_key()), private)

    def sign(self, data: bytes) -> bytes:
        """An ECDSA signature with SHA-256, as DER; deterministic where the library can (RFC
        6979)."""
        crypto = _library()
        digest = crypto.hashes.SHA256()
        try:
            algorithm = crypto.ec.ECDSA(digest, deterministic_signing=True)
        except crypto.UnsupportedAlgorithm:
            algorithm = crypto.ec.ECDSA(digest)
        signature: bytes = self._private.sign(data, algorithm)
        return signature


def has_signed(public: bytes, signature: bytes, data: bytes) -> bool:
    crypto = _library()
    try:
        key = crypto.serialization.load_der_public_key(public)
        if not _is_p256(crypto, key):
            return False
        key.verify(signature, data, crypto.ec.ECDSA(crypto.hashes.SHA256()))
    except (ValueError, TypeError, crypto.InvalidSignature, crypto.UnsupportedAlgorithm):
        return False
    return True


def fingerprint(public: bytes) -> str:
    return sha256_hex(public)


def _pem_hint(public: bytes) -> str:
    """sha256 of a public key as PEM, by which signature files name it, 64 hex digits."""
    text = base64.b64encode(public).decode()
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    pem = "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""])
    return sha256_hex(pem.encode())


def _public_key_of_file(path: Path) -> bytes:
    crypto = _library()
    try:
        key = crypto.serialization.load_pem_public_key(read_file(path, max_bytes=MAX_BYTES))
    except (MalformedFile, ValueError, TypeError, crypto.UnsupportedAlgorithm):
        key = None
    if not _is_p256(crypto, key):
        raise UsageError(
            f"{path} holds no public key of the curve P-256.",
            hint="its owner makes one of the private key: openssl ec -in zoo.pem -pubout",
        )
    return _der(crypto, key)


def _der(crypto: Any, key: Any) -> bytes:
    kind = crypto.serialization
    data: bytes = key.public_bytes(kind.Encoding.DER, kind.PublicFormat.SubjectPublicKeyInfo)
    return data


def _is_p256(crypto: Any, key: Any) -> bool:
    return isinstance(getattr(key, "curve", None), crypto.ec.SECP256R1)


def _library() -> Any:
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise MissingDependency.for_extra("cryptography", "sign") from error
    return SimpleNamespace(
        InvalidSignature=InvalidSignature,
        UnsupportedAlgorithm=UnsupportedAlgorithm,
        hashes=hashes,
        serialization=serialization,
        ec=ec,
    )


@dataclass(frozen=True)
class KnownKey:
    """A key that is known, and who vouches for it; `public` is `None` where only its fingerprint is
    known, and after `until` it is no longer trusted."""

    fingerprint: str
    by: str
    public: bytes | None = None
    until: datetime | None = None


@dataclass(frozen=True)
class KnownKeys:
    keys: tuple[KnownKey, ...] = ()

    @classmethod
    def gather(
        cls, files: Iterable[str | Path] = (), pinned: Mapping[str, str | None] | None = None
    ) -> Self:
        """The keys in `files` and no others, or those pinned for hubs and those of the package."""
        named = [(_public_key_of_file(Path(path)), f"--key {path}") for path in files]
        keys = [KnownKey(fingerprint(public), by, public) for public, by in named]
        if keys:
            return cls(tuple(keys))
        for hub, mark in (pinned or {}).items():
            if mark is not None:
                keys.append(KnownKey(mark, f"the key of {hub}"))
        for row in packaged_keys().keys:
            by = f"shipped with oscar-zoo: {row.owner}"
            keys.append(KnownKey(fingerprint(row.public), by, row.public, row.until))
        return cls(tuple(keys))


NOT_SIGNED = SignatureReport("missing", code="signature.missing", message="is not signed")
"""The report of an artifact without a signature file."""


def check_signature(
    data: bytes | None, files: Mapping[str, bytes], keys: KnownKeys, *, others: Collection[str] = ()
) -> SignatureReport:
    """Hold a signature file against the files of an artifact and against known keys; `others` are
    further names of its folder."""
    if data is None:
        return NOT_SIGNED
    try:
        found = SignatureFile.from_bytes(data)
    except MalformedFile as error:
        return unreadable(error)
    public = found.key
    for one in keys.keys:
        if public is None and one.public and found.hint == _pem_hint(one.public):
            public = one.public
    mark = None if public is None else fingerprint(public)
    if (wrong := _difference(found.files, files, others)) is not None:
        return _invalid(*wrong, mark)
    if public is None or mark is None:
        message = f"is signed by a key that is not known here (hint {(found.hint or 'none')[:16]})"
        return SignatureReport("unknown_key", None, None, "signature.unknown_key", message)
    try:
        signed = has_signed(public, found.signature, found.signed_bytes)
    except MissingDependency:
        text = "has a signature that is not checked: pip install 'oscar-zoo[sign]'"
        return SignatureReport("not_checked", mark, None, "signature.not_checked", text)
    if not signed or found.hint not in (None, _pem_hint(public)):
        return _invalid("invalid", "has a signature that is none of its key", mark)
    known = [key for key in keys.keys if key.fingerprint == mark]
    for key in known:
        if key.until is None or key.until >= now():
            return SignatureReport("valid", mark, key.by)
    if known:
        until = f"{known[0].until:%Y-%m-%d}"
        message = f"is signed by {mark[:16]}, a key that was trusted until {until}"
        return _invalid("expired", message, mark)
    message = f"is signed by {mark[:16]}, a key that is not known here"
    return SignatureReport("unknown_key", mark, None, "signature.unknown_key", message)


def unreadable(error: MalformedFile) -> SignatureReport:
    message = f"has a signature that cannot be read: {error.message}".rstrip(".")
    return _invalid("format", message)


def sign(artifact: str, files: Mapping[str, bytes], key: SigningKey) -> bytes:
    digests = {path: sha256_hex(content) for path, content in files.items()}
    payload = signature_file.statement_bytes(artifact, digests, key.public)
    signature = key.sign(signature_file.pre_authentication(payload))
    return signature_file.bundle_bytes(payload, signature, _pem_hint(key.public))


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
    verify: Callable[[], Outcome], signature: SignatureReport | None, signing: Signed
) -> Outcome:
    """The outcome of `verify`, with a line about the signature where there is one; where one is
    required and not valid, nothing of the artifact is parsed."""
    if signature is None:
        return verify()
    if signing.require_signature and signature.state != "valid":
        message = f"the artifact {signature.message}"
        failed = Check("signature", "failed", message)
        code = str(signature.code)
        return Rejected("signature", code, message, checks=(failed,), signature=signature)
    outcome = replace(verify(), signature=signature)
    if not isinstance(outcome, Verified) or signature.state == "missing":
        return outcome
    state: State = "ok" if signature.state == "valid" else "warning"
    state = "not checked" if signature.state == "not_checked" else state
    line = Check("signature", state, signature.sentence)
    return replace(outcome, checks=(*outcome.checks, line))


def signature_of(
    stored: StoredArtifact, signing: Signed | None = None, seen: Pins | None = None
) -> SignatureReport:
    """Of a copy in the store, by the key of the hub that it came from, whichever hub is asked."""
    hub, files = stored.record.source, signing.keys if signing else ()
    keys = KnownKeys.gather(files, {hub: (seen or PinFile.known().read()).key_of(hub)})
    return check_signature(stored.signature, stored.signed_files, keys)


def signature_in(folder: Path, files: dict[str, bytes], signing: Signed) -> SignatureReport:
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
