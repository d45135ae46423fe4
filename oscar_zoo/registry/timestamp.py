"""The timestamp of a hub: a signed document beside the index that says which index is in force, and
until when, after the timestamp role of TUF.

Whoever keeps serving one old and valid index is noticed when its timestamp expires, and a changed
index when its digest differs. The index names the digest of every artifact, so the signature covers
them too. A hub signs when its owner wants it to. The key is pinned on first use; from then on the
hub must have a timestamp of that key.
"""

from __future__ import annotations

import base64
import binascii
import json
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, Self

from pydantic import Field, ValidationError

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.specs import Hex64, Spec, Text
from oscar_zoo.errors import (
    FrozenIndex,
    MalformedFile,
    MissingDependency,
    SignatureError,
    malformed_hint,
)
from oscar_zoo.hubs.base import TIMESTAMP_NAME
from oscar_zoo.registry import signing_key
from oscar_zoo.registry.signing_key import SigningKey

SCHEMA: Final = "oscar-zoo.timestamp/1"
LIFETIME = timedelta(days=90)
"""How long a timestamp is valid; every command that writes with the key renews it."""
_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def now() -> datetime:
    """The time by which timestamps are judged."""
    return datetime.now(UTC)


class Timestamp(Spec):
    """The document.

    Attributes:
        serial: of the index.
        index_sha256: of the bytes of `index.json`.
        expires: when this document is no longer valid, RFC 3339 UTC.
        key: the public key, DER in base64.
        signature: of all other fields in canonical JSON, DER in base64.
    """

    schema_: Literal["oscar-zoo.timestamp/1"] = Field(alias="schema")
    serial: Annotated[int, Field(ge=0, lt=1 << 53)]
    index_sha256: Hex64
    expires: Text
    key: Text
    signature: Text

    @classmethod
    def of(cls, index: bytes, serial: int, key: SigningKey, *, at: datetime | None = None) -> Self:
        """The timestamp of `index`, made `at` a time, signed with `key`."""
        until = (at or now()) + LIFETIME
        unsigned = cls(
            schema=SCHEMA,
            serial=serial,
            index_sha256=sha256_hex(index),
            expires=until.strftime(_FORMAT),
            key=base64.b64encode(key.public).decode(),
            signature="-",
        )
        signature = base64.b64encode(key.sign(unsigned.signed_bytes)).decode()
        return unsigned.model_copy(update={"signature": signature})

    @classmethod
    @malformed_hint("ask the owner of the hub to sign it again")
    def from_bytes(cls, data: bytes, what: str) -> Self:
        """Parse an untrusted document; raises `MalformedFile`."""
        value = strict_json.loads(data, what=what)
        try:
            found = cls.model_validate_json(json.dumps(value))
            found.until, found.public  # noqa: B018  (they must be readable)
        except (ValidationError, ValueError) as error:
            cause = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise MalformedFile(
                "timestamp.schema", f"{what} is no timestamp: {cause}.", hint="ask the hub's owner"
            ) from None
        return found

    def to_bytes(self) -> bytes:
        """The file form."""
        return strict_json.pretty_bytes(self.model_dump(mode="json", by_alias=True))

    @property
    def signed_bytes(self) -> bytes:
        """What the signature is of."""
        value = self.model_dump(mode="json", by_alias=True)
        del value["signature"]
        return strict_json.canonical_bytes(value)

    @property
    def until(self) -> datetime:
        """`expires` as a time."""
        return datetime.strptime(self.expires, _FORMAT).replace(tzinfo=UTC)

    @property
    def public(self) -> bytes:
        """`key` as bytes."""
        return _decoded(self.key)

    @property
    def fingerprint(self) -> str:
        """sha256 of the public key."""
        return signing_key.fingerprint(self.public)

    def is_signed(self) -> bool:
        """Whether the owner of `key` signed this; raises `MissingDependency`."""
        try:
            signature = _decoded(self.signature)
        except ValueError:
            return False
        return signing_key.has_signed(self.public, signature, self.signed_bytes)


def checked_key(
    stamp: bytes | None, index: bytes | None, *, hub: str, pinned: str | None, allow_old: bool
) -> str | None:
    """The fingerprint of the key that signed the index of a hub, or `None` of a hub without one.

    Args:
        stamp: its `timestamp.json`, or `None`.
        index: its `index.json`, or `None`.
        pinned: the fingerprint seen before, or `None`.
    """
    if stamp is None:
        if pinned is not None:
            raise SignatureError.for_hub(hub, f"is not signed any more; key {pinned[:16]} did")
        return None
    found = Timestamp.from_bytes(stamp, f"{TIMESTAMP_NAME} of {hub}")
    if pinned is not None and found.fingerprint != pinned:
        raise SignatureError.for_hub(
            hub, f"is signed by key {found.fingerprint[:16]}, and was by {pinned[:16]}"
        )
    try:
        signed = found.is_signed()
    except MissingDependency:
        if pinned is not None:
            raise
        return None  # as of a hub that does not sign, which is what this machine can tell
    if not signed:
        raise SignatureError.for_hub(hub, "has a signature that is none of its key")
    if found.index_sha256 != sha256_hex(index or b""):
        raise SignatureError.for_hub(hub, "is another one than its owner signed")
    if found.until < now() and not allow_old:
        raise FrozenIndex.for_hub(hub, found.expires)
    return found.fingerprint


def renewed(stamp: bytes | None, index: bytes, serial: int, key: SigningKey | None) -> bytes | None:
    """The timestamp to write beside `index`, or `None` where the one that is there stays or none is
    wanted.

    Args:
        key: of whoever writes, or `None`.
    """
    before = None
    if stamp is not None:
        before = Timestamp.from_bytes(stamp, TIMESTAMP_NAME)
        if key is None and before.index_sha256 != sha256_hex(index):
            raise SignatureError(
                "the index of this hub is signed, and no key is named.",
                hint=f"name the file of its private key: export {signing_key.VARIABLE}=zoo.pem",
            )
    if key is None:
        return None
    fresh = Timestamp.of(index, serial, key)
    same = before is not None and (before.key, before.index_sha256) == (
        fresh.key,
        fresh.index_sha256,
    )
    if same and before is not None and before.until - now() > LIFETIME / 2:
        return None
    return fresh.to_bytes()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"no base64: {error}") from None
