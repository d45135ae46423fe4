"""Bad signature files, built from a good one: each breaks one rule and names the reason it must be
refused for."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

from oscar_zoo.artifact.signature_file import MAX_BYTES, MAX_FILES, bundle_bytes, statement_bytes

Case = tuple[str, str, bytes]
FILES = {"k_rotation.pt": "11" * 32, "oscar.json": "22" * 32}
KEY = b"no key at all"


def good() -> bytes:
    """A well-formed file, whose signature is none."""
    return bundle_bytes(statement_bytes("Model/tag", FILES, KEY), b"signature", "33" * 32)


def cases() -> Iterator[Case]:
    """Every bad file: its name, the reason, its bytes."""
    yield "empty", "json.syntax", b""
    yield "web page", "json.syntax", b"<!doctype html>"
    yield "binary", "json.encoding", b"\xff\xfe\x00"
    yield "too large", "json.size", good() + b" " * MAX_BYTES
    yield "list", "signature.schema", b"[]"
    yield "deep", "json.depth", b"[" * 100 + b"]" * 100
    yield "key twice", "json.duplicate_key", b'{"mediaType": "a", "mediaType": "b"}'
    yield from _bundles()
    yield from _statements()


def _bundles() -> Iterator[Case]:
    def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
        value = json.loads(good())
        change(value)
        return json.dumps(value).encode()

    schema = "signature.schema"
    yield "media type", schema, changed(lambda v: v.update(mediaType="x"))
    yield "more in the bundle", schema, changed(lambda v: v.update(more=1))
    yield "no envelope", schema, changed(lambda v: v.pop("dsseEnvelope"))
    yield "log", schema, changed(lambda v: v["verificationMaterial"].update(tlogEntries=[{}]))
    yield "certificate", schema, changed(lambda v: v.update(verificationMaterial={"x509": "x"}))
    hint = {"hint": "x" * 64}
    yield "hint", schema, changed(lambda v: v["verificationMaterial"].update(publicKey=hint))
    envelope = {
        "payload type": {"payloadType": "text/plain"},
        "no signature": {"signatures": []},
        "two signatures": {"signatures": [{"sig": "YQ=="}] * 2},
        "signature number": {"signatures": [{"sig": 7}]},
        "signature text": {"signatures": [{"sig": "?!"}]},
        "signature letters": {"signatures": [{"sig": "\u00e4"}]},
        "payload text": {"payload": "?"},
    }
    for name, change in envelope.items():
        yield name, schema, changed(lambda v, c=change: v["dsseEnvelope"].update(c))


def _statements() -> Iterator[Case]:
    def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
        value = json.loads(statement_bytes("Model/tag", FILES, KEY))
        change(value)
        return with_payload(json.dumps(value).encode())

    schema = "signature.schema"
    yield "payload is no JSON", "json.syntax", with_payload(b"hello")
    yield "payload is a list", schema, with_payload(b"[]")
    yield "payload with NaN", "json.number", with_payload(b'{"_type": NaN}')
    older = "https://model_signing/Digests/v0.1"
    for kind in (older, "https://model_signing/signature/v9.0", None, 7):
        wrong = {"predicateType": kind}
        yield (
            f"predicate {kind}",
            "signature.version",
            changed(lambda v, w=wrong: v.update(w)),
        )
    yield "statement", "signature.version", changed(lambda v: v.update(_type="x"))
    yield "two subjects", schema, changed(lambda v: v.update(subject=v["subject"] * 2))
    digest = {"digest": {"sha256": "44" * 32}}
    yield "other sum", schema, changed(lambda v: v["subject"][0].update(digest))
    for name, row in {
        "escape": {"name": "../k_rotation.pt"},
        "absolute": {"name": "/etc/passwd"},
        "deep path": {"name": "a/b/c/d/e"},
        "empty name": {"name": ""},
        "control": {"name": "k\u001b[31m.pt"},
        "bidirectional": {"name": "k\u202e.pt"},
        "other hash": {"algorithm": "blake3"},
        "short digest": {"digest": "11"},
        "digest number": {"digest": 11},
    }.items():
        yield name, schema, changed(lambda v, r=row: v["predicate"]["resources"][0].update(r))
    rows: dict[str, Callable[[list[Any]], list[Any]]] = {
        "no files": lambda _: [],
        "a file twice": lambda rows: [rows[0], rows[0]],
        "many files": lambda rows: rows[:1] * (MAX_FILES + 1),
    }
    for name, make in rows.items():
        yield (
            name,
            schema,
            changed(
                lambda v, m=make: v["predicate"].update(resources=m(v["predicate"]["resources"]))
            ),
        )
    shards = {"method": "shards", "hash_type": "sha256"}
    yield "shards", schema, changed(lambda v: v["predicate"].update(serialization=shards))
    yield "key text", schema, changed(lambda v: v["predicate"]["oscar_zoo"].update(key="?"))


def with_payload(payload: bytes) -> bytes:
    """The good file around another payload."""
    value = json.loads(good())
    value["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    return json.dumps(value).encode()
