"""The signature of one artifact: `model.sig` beside `oscar.json`, in the format of OpenSSF Model
Signing 1.0, so that its own tool checks a pulled folder as well.

The file is a Sigstore bundle: JSON that holds a DSSE envelope. Its payload is an in-toto statement
with the sha256 of every file of the artifact, `oscar.json` included; the signature is of the
payload. This module writes and reads the format and knows nothing of keys; the bytes of strangers
are bounded, strict JSON of a closed schema. Two fields of the statement's predicate are ours, which
the format allows: the public key, so that a reader who knows only its fingerprint can check, and
the id of the artifact.

Source: the documentation of `model_signing` 1.1.1, and DSSE 1.0 (`PAE`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import MAX_PARTS, REPORT_NAME, SIGNATURE_NAME
from oscar_zoo.artifact.names import check_part
from oscar_zoo.artifact.specs import Hex64, Text, validated
from oscar_zoo.errors import InvalidName, MalformedFile, malformed_hint

MAX_BYTES = 256 << 10
"""Larger signature files are not read; one of four files has 2 KB."""
MAX_FILES = 1024
"""Most files that one signature may list."""
NOT_SIGNED = frozenset(
    {SIGNATURE_NAME, REPORT_NAME, ".git", ".gitattributes", ".github", ".gitignore"}
)
"""Names in a signed folder that the format leaves out."""

_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_OURS = "oscar_zoo"


@dataclass(frozen=True)
class SignatureFile:
    """A signature that was read; nothing of it is checked against a key yet. `files` are paths and
    their sha256, `signature` is DER, `hint` the sha256 of the public key as PEM, and `key` the
    public key as DER, as the signer says."""

    files: Mapping[str, str]
    payload: bytes
    signature: bytes
    hint: str | None
    key: bytes | None

    @property
    def signed_bytes(self) -> bytes:
        return pre_authentication(self.payload)

    @classmethod
    @malformed_hint("fetch it again, or ask its publisher to sign it again")
    def from_bytes(cls, data: bytes, what: str = SIGNATURE_NAME) -> Self:
        bundle = validated(_Bundle, _json(data, what), code="signature.schema", what=what)
        envelope = bundle.dsse_envelope
        payload = _decoded(envelope.payload, what)
        statement = _statement(payload, what)
        ours = statement.predicate.oscar_zoo
        return cls(
            files=_listed(statement, what),
            payload=payload,
            signature=_decoded(envelope.signatures[0].sig, what),
            hint=bundle.verification_material.public_key.hint,
            key=None if ours is None else _decoded(ours.key, what),
        )


def statement_bytes(artifact: str, files: Mapping[str, str], key: bytes) -> bytes:
    ordered = sorted(files, key=PurePosixPath)
    predicate = {
        "serialization": {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": sorted(NOT_SIGNED),
        },
        "resources": [
            {"name": path, "algorithm": "sha256", "digest": files[path]} for path in ordered
        ],
        _OURS: {"artifact": artifact, "key": base64.b64encode(key).decode()},
    }
    subject = {"name": artifact, "digest": {"sha256": _root_digest(files, ordered)}}
    kinds = {"_type": _STATEMENT, "predicateType": _PREDICATE}
    return strict_json.pretty_bytes({**kinds, "subject": [subject], "predicate": predicate})


def bundle_bytes(payload: bytes, signature: bytes, hint: str) -> bytes:
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": _PAYLOAD_TYPE,
        "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
    }
    material = {"publicKey": {"hint": hint}, "tlogEntries": []}
    bundle = {"verificationMaterial": material, "dsseEnvelope": envelope}
    return strict_json.pretty_bytes({"mediaType": _MEDIA_TYPE, **bundle})


def pre_authentication(payload: bytes) -> bytes:
    """The bytes that a DSSE signature of `payload` is of."""
    kind = _PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


class _Closed(BaseModel):
    """A part of the bundle: exact types, no unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=to_camel, populate_by_name=True
    )


class _PublicKey(_Closed):
    hint: Hex64 | None = None


class _Material(_Closed):
    public_key: _PublicKey
    tlog_entries: Annotated[list[Any], Field(max_length=0)] = []


class _Signature(_Closed):
    sig: str
    keyid: str = ""


class _Envelope(_Closed):
    payload: str
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: Annotated[list[_Signature], Field(min_length=1, max_length=1)]


class _Bundle(_Closed):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: _Envelope


class _Open(BaseModel):
    """A part of the statement; readers pass over keys that they do not know, as the format asks."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class _Serialization(_Open):
    method: Literal["files"]
    hash_type: Literal["sha256"]


class _Resource(_Open):
    name: Text
    algorithm: Literal["sha256"]
    digest: Hex64


class _Ours(_Open):
    key: str


class _Predicate(_Open):
    serialization: _Serialization
    resources: Annotated[list[_Resource], Field(min_length=1, max_length=MAX_FILES)]
    oscar_zoo: _Ours | None = None


class _Digest(_Open):
    sha256: Hex64


class _Subject(_Open):
    digest: _Digest


class _Statement(_Open):
    subject: Annotated[list[_Subject], Field(min_length=1, max_length=1)]
    predicate: _Predicate


def _statement(payload: bytes, what: str) -> _Statement:
    value = _json(payload, what)
    kind = value.get("_type"), value.get("predicateType")
    if kind != (_STATEMENT, _PREDICATE):
        message = f"{what} has a statement of the kind {str(kind[1])[:80]!r}, not {_PREDICATE!r}."
        raise MalformedFile("signature.version", message, hint="it has to be signed again")
    return validated(_Statement, value, code="signature.schema", what=what)


def _listed(statement: _Statement, what: str) -> dict[str, str]:
    """The files of a statement, whose names are judged and whose sum is compared."""
    files: dict[str, str] = {}
    for row in statement.predicate.resources:
        try:
            parts = [check_part(part, "file name") for part in row.name.split("/")]
        except InvalidName as error:
            _bad(f"{what}: {error.message}")
        if len(parts) > MAX_PARTS or row.name in files:
            _bad(f"{what} lists {row.name[:80]!r} wrongly.")
        files[row.name] = row.digest
    if _root_digest(files, files) != statement.subject[0].digest.sha256:
        _bad(f"{what}: its digest is not that of its files.")
    return files


def _root_digest(files: Mapping[str, str], ordered: Any) -> str:
    return sha256_hex(b"".join(bytes.fromhex(files[path]) for path in ordered))


def _bad(message: str) -> NoReturn:
    raise MalformedFile("signature.schema", message)


def _json(data: bytes, what: str) -> dict[str, Any]:
    value = strict_json.loads(data, what=what, max_bytes=MAX_BYTES)
    if type(value) is not dict:
        _bad(f"{what} is not a JSON object.")
    return value


def _decoded(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        _bad(f"{what} has text that is no base64.")
