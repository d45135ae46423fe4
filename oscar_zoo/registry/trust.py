"""Which bytes may be used under an id: every promise made before, and what happens when a hub
breaks one.

A promise of the past (the project's lock, what this user has seen, the copy in the store) can be
given up on purpose, with `accept_new`. A promise of the present (the manifest shipped with this
package, the index of the hub itself) cannot: the bytes are simply wrong.

A hub may sign which index is in force, and until when (`timestamp.json`, after the timestamp role
of TUF): who keeps serving one old and valid index is noticed when it expires, and a changed index
when its digest differs. The key is pinned on first use; from then on the hub must have one.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Literal, Self

from pydantic import Field

from oscar_zoo import errors
from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.specs import Document, Hex64, Text
from oscar_zoo.registry import signatures
from oscar_zoo.registry.catalog import TIME_FORMAT, Catalog, Moment, PublicKey
from oscar_zoo.registry.hubs.base import TIMESTAMP_NAME
from oscar_zoo.registry.index import Index, IndexEntry
from oscar_zoo.registry.pins import Pin, PinFile
from oscar_zoo.registry.signatures import SigningKey


@dataclass(frozen=True)
class Promise:
    """What somebody said an artifact is. It cannot be given up where it is `final`, and says
    nothing of `oscar.json` unless it is `about_manifest`."""

    digest: str
    manifest_sha256: str | None
    by: str
    final: bool = False
    about_manifest: bool = True

    def broken(self, digest: str | None, manifest_sha256: str | None) -> bool:
        """Whether an offer is another one; a `digest` of `None` is not known yet."""
        if digest is not None and digest != self.digest:
            return True
        return self.about_manifest and manifest_sha256 != self.manifest_sha256


@dataclass(frozen=True)
class Trust:
    """What has been seen before, and how strict to be: `write_lock` adds what was used to `lock`,
    with `accept_new` promises of the past may be broken, with `allow_downgrade` an index may go
    back."""

    known: PinFile = field(default_factory=PinFile.known)
    lock: PinFile | None = None
    locked: bool = False
    write_lock: bool = True
    accept_new: bool = False
    allow_downgrade: bool = False

    def pinned(self, reference: Reference, catalog: Catalog) -> Pin | None:
        if self.lock is None or self.accept_new:
            return None
        recipe, folder = catalog.recipe(reference.name), reference.name.rsplit("/", 1)[-1]
        if recipe is None and "/" in reference.name and catalog.recipe(folder) is not None:
            folder = ""  # another organisation's model of a name the zoo knows: never the pinned
        model, default = (recipe.name, recipe.default_tag) if recipe else (folder, None)
        try:
            return self.lock.read().find(reference, model, default)
        except errors.AmbiguousName as error:  # withdrawn versions are among them, too
            error.message = f"{error.message.rstrip('.')}, which {self.lock.path.name} pins."
            error.args = (error.message,)
            raise

    def promises(
        self,
        artifact: ArtifactId,
        *,
        entry: IndexEntry | None = None,
        packaged: Promise | None = None,
    ) -> Iterator[Promise]:
        """Everything promised but by the copy in the store, the strongest first."""
        if packaged is not None:
            yield packaged
        if entry is not None:
            yield Promise(entry.digest, entry.manifest_sha256, "the hub's own index", final=True)
        for place, name in ((self.lock, None), (self.known, "this user's known artifacts")):
            pin = place.read().pin(artifact) if place is not None else None
            if pin is not None and place is not None:
                by = f"{name or place.path.name} (first seen {pin.first_seen[:10]})"
                yield Promise(pin.digest, pin.manifest_sha256, by)

    def check(
        self,
        artifact: ArtifactId,
        digest: str | None,
        manifest_sha256: str | None,
        *,
        of: Sequence[Promise],
        hub: str,
    ) -> None:
        for promise in of:
            can_be_given_up = self.accept_new and not promise.final
            if promise.broken(digest, manifest_sha256) and not can_be_given_up:
                raise _broken(artifact, promise, digest, manifest_sha256, hub)

    def check_serial(self, hub: str, index: Index) -> None:
        seen = self.known.read().serials.get(hub, 0)
        if index.serial < seen and not self.allow_downgrade:
            raise errors.RollbackError.for_serial(hub, seen, index.serial)

    def check_timestamp(self, hub: str, stamp: bytes | None, index: bytes | None) -> str | None:
        pinned = None if self.accept_new else self.known.read().keys.get(hub)
        return checked_key(stamp, index, hub=hub, pinned=pinned, allow_old=self.allow_downgrade)

    def key_of(self, hub: str) -> str | None:
        return self.known.read().key_of(hub)

    def remember(
        self, pin: Pin, *, hub: str = "", index: Index | None = None, key: str | None = None
    ) -> None:
        """Write down what was used: for this user, and in the lock where it may be written."""
        serial = 0 if index is None else index.serial
        self.known.update(lambda pins: pins.with_pin(pin).with_index(hub, serial, key))
        if self.lock is not None and self.write_lock and not self.locked:
            self.lock.update(lambda pins: pins.with_pin(pin))


def _broken(
    artifact: ArtifactId,
    promise: Promise,
    digest: str | None,
    manifest_sha256: str | None,
    hub: str,
) -> errors.DigestMismatchError:
    what, want, got = str(artifact), promise.digest, digest or ""
    if digest in (None, promise.digest):
        want, got = promise.manifest_sha256 or "no file", manifest_sha256 or "no file"
        what = f"{FILE_NAME} of {artifact}"
    said = f"{what} changed: {want} by {promise.by}, {hub} now offers {got}."
    hint = "versions never change; ask the publisher, or accept them with --accept-new-digest"
    if promise.final:
        said = f"{what} is {want} by {promise.by}; {hub} offers {got}."
        hint = "do not use it; tell the owner of the hub"
    error = errors.DigestMismatchError(said, hint=hint)
    error.what, error.want, error.got = what, want, got
    return error


LIFETIME = timedelta(days=90)
"""How long a timestamp is valid; every command that writes with the key renews it."""


class Timestamp(Document, PublicKey):
    """Which index is in force, and until when. `signature` is of all other fields in canonical
    JSON, base64 as the public `key` is."""

    NAME, CODE = TIMESTAMP_NAME, "timestamp"
    REMEDY = "ask the owner of the hub to sign it again"
    schema_: Literal["oscar-zoo.timestamp/1"] = Field(alias="schema")
    serial: Annotated[int, Field(ge=0, lt=1 << 53)]
    index_sha256: Hex64
    expires: Moment
    signature: Text

    @classmethod
    def of(cls, index: bytes, serial: int, key: SigningKey) -> Self:
        unsigned = cls(
            schema="oscar-zoo.timestamp/1",
            serial=serial,
            index_sha256=sha256_hex(index),
            expires=(signatures.now() + LIFETIME).strftime(TIME_FORMAT),
            key=base64.b64encode(key.public).decode(),
            signature="-",
        )
        signature = base64.b64encode(key.sign(unsigned.signed_bytes)).decode()
        return unsigned.model_copy(update={"signature": signature})

    @property
    def signed_bytes(self) -> bytes:
        value = self.model_dump(mode="json", by_alias=True, exclude={"signature"})
        return strict_json.canonical_bytes(value)

    @property
    def fingerprint(self) -> str:
        return signatures.fingerprint(self.public)

    def is_signed(self) -> bool:
        try:
            signature = base64.b64decode(self.signature, validate=True)
        except ValueError:
            return False
        return signatures.has_signed(self.public, signature, self.signed_bytes)


def checked_key(
    stamp: bytes | None, index: bytes | None, *, hub: str, pinned: str | None, allow_old: bool
) -> str | None:
    """The fingerprint of the key that signed the index of a hub, or `None` of a hub without one;
    `pinned` is the one seen before."""
    if stamp is None:
        if pinned is not None:
            raise errors.SignatureError.for_hub(
                hub, f"is not signed any more; key {pinned[:16]} did"
            )
        return None
    found = Timestamp.from_bytes(stamp, what=f"{TIMESTAMP_NAME} of {hub}")
    if pinned is not None and found.fingerprint != pinned:
        raise errors.SignatureError.for_hub(
            hub, f"is signed by key {found.fingerprint[:16]}, and was by {pinned[:16]}"
        )
    try:
        signed = found.is_signed()
    except errors.MissingDependency:
        if pinned is not None:
            raise
        return None  # as of a hub that does not sign, which is what this machine can tell
    if not signed:
        raise errors.SignatureError.for_hub(hub, "has a signature that is none of its key")
    if found.index_sha256 != sha256_hex(index or b""):
        raise errors.SignatureError.for_hub(hub, "is another one than its owner signed")
    if found.until < signatures.now() and not allow_old:
        raise errors.FrozenIndex.for_hub(hub, found.expires)
    return found.fingerprint


def renewed(stamp: bytes | None, index: bytes, serial: int, key: SigningKey | None) -> bytes | None:
    """The timestamp to write beside `index`; `None` where the one that is there stays."""
    before = None if stamp is None else Timestamp.from_bytes(stamp)
    same = before is not None and before.index_sha256 == sha256_hex(index)
    if key is None:
        if before is not None and not same:
            raise errors.SignatureError(
                "the index of this hub is signed, and no key is named.",
                hint=f"name the file of its private key: export {signatures.VARIABLE}=zoo.pem",
            )
        return None
    if before is not None and same and before.public == key.public:
        is_fresh = before.until - signatures.now() > LIFETIME / 2
        if is_fresh:
            return None
    return Timestamp.of(index, serial, key).to_bytes()
