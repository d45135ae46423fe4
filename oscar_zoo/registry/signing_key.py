"""Elliptic keys on the curve P-256 that sign what a hub says; needs `oscar-zoo[sign]`.

A private key is a PEM file without a password, which only its owner may read:

    openssl ecparam -name prime256v1 -genkey -noout -out zoo.pem
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from oscar_zoo.artifact.files import read_file, sha256_hex
from oscar_zoo.errors import MalformedFile, MissingDependency, UsageError

VARIABLE = "OSCAR_ZOO_SIGN_KEY"
"""Names the file of the private key, for every command that writes an index."""
MAX_BYTES = 1 << 14


@dataclass(frozen=True)
class SigningKey:
    """A private key.

    Attributes:
        public: the public key as DER (`SubjectPublicKeyInfo`).
    """

    public: bytes
    _private: Any

    @classmethod
    def configured(cls) -> Self | None:
        """The key of `OSCAR_ZOO_SIGN_KEY`, or `None` when none is named."""
        name = os.environ.get(VARIABLE, "").strip()
        return cls.of_file(Path(name).expanduser()) if name else None

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """The key in the PEM file `path`; raises as `configured`."""
        crypto = _library()
        data = read_file(path, max_bytes=MAX_BYTES)
        if path.stat().st_mode & 0o077:
            raise UsageError(f"others than you may read the key {path}.", hint=f"chmod 600 {path}")
        try:
            private = crypto.serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError):
            private = None
        if not _is_p256(crypto, getattr(private, "curve", None)):
            raise UsageError(
                f"{path} holds no private key of the curve P-256 without a password.",
                hint="openssl ecparam -name prime256v1 -genkey -noout -out zoo.pem",
            )
        assert private is not None
        public = private.public_key().public_bytes(
            crypto.serialization.Encoding.DER,
            crypto.serialization.PublicFormat.SubjectPublicKeyInfo,
        )
        return cls(public, private)

    def sign(self, data: bytes) -> bytes:
        """An ECDSA signature of `data` with SHA-256, as DER; the same one every time where the
        library can (RFC 6979)."""
        crypto = _library()
        digest = crypto.hashes.SHA256()
        try:
            algorithm = crypto.ec.ECDSA(digest, deterministic_signing=True)
        except crypto.UnsupportedAlgorithm:
            algorithm = crypto.ec.ECDSA(digest)
        signature: bytes = self._private.sign(data, algorithm)
        return signature


def public_key_of_file(path: Path) -> bytes:
    """The public key in the PEM file `path`, as DER."""
    crypto = _library()
    try:
        data = read_file(path, max_bytes=MAX_BYTES)
        key = crypto.serialization.load_pem_public_key(data)
    except (MalformedFile, ValueError, TypeError, crypto.UnsupportedAlgorithm):
        key = None
    if not _is_p256(crypto, getattr(key, "curve", None)):
        raise UsageError(
            f"{path} holds no public key of the curve P-256.",
            hint="its owner makes one of the private key: openssl ec -in zoo.pem -pubout",
        )
    assert key is not None
    public: bytes = key.public_bytes(
        crypto.serialization.Encoding.DER,
        crypto.serialization.PublicFormat.SubjectPublicKeyInfo,
    )
    return public


def has_signed(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the owner of the `public` key signed `data`; raises `MissingDependency`."""
    crypto = _library()
    try:
        key = crypto.serialization.load_der_public_key(public)
        if not _is_p256(crypto, getattr(key, "curve", None)):
            return False
        key.verify(signature, data, crypto.ec.ECDSA(crypto.hashes.SHA256()))
    except (ValueError, TypeError, crypto.InvalidSignature, crypto.UnsupportedAlgorithm):
        return False
    return True


def fingerprint(public: bytes) -> str:
    """sha256 of a public key, 64 hex digits."""
    return sha256_hex(public)


def pem_hint(public: bytes) -> str:
    """sha256 of a public key as PEM, by which signature files name it, 64 hex digits."""
    text = base64.b64encode(public).decode()
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    pem = "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""])
    return sha256_hex(pem.encode())


def _is_p256(crypto: Any, curve: Any) -> bool:
    return isinstance(curve, crypto.ec.SECP256R1)


class _Crypto:
    """The parts of the library that are used."""

    def __init__(self) -> None:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        self.InvalidSignature, self.UnsupportedAlgorithm = InvalidSignature, UnsupportedAlgorithm
        self.hashes, self.serialization, self.ec = hashes, serialization, ec


def _library() -> Any:
    try:
        return _Crypto()
    except ImportError as error:
        raise MissingDependency.for_extra("cryptography", "sign") from error
