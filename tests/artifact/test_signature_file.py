"""The format of signature files: what is written is read, and what strangers may write is
bounded."""

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oscar_zoo.artifact.signature_file import (
    MAX_BYTES,
    MAX_FILES,
    SignatureFile,
    bundle_bytes,
    pre_authentication,
    statement_bytes,
)
from oscar_zoo.errors import MalformedFile

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
        data = changed(lambda v, w=wrong: v.update(w))
        yield f"predicate {kind}", "signature.version", data
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


CASES = {name: (reason, data) for name, reason, data in cases()}


def test_what_is_written_is_read() -> None:
    found = SignatureFile.from_bytes(good())
    assert found.files == FILES and found.key == KEY
    assert (found.signature, found.hint) == (b"signature", "33" * 32)
    assert found.payload == statement_bytes("Model/tag", FILES, KEY)
    assert found.signed_bytes == pre_authentication(found.payload)


def test_the_signed_bytes_are_those_of_dsse() -> None:
    # The example of the protocol's text, with our payload type.
    assert pre_authentication(b"hello world") == (
        b"DSSEv1 28 application/vnd.in-toto+json 11 hello world"
    )


def test_fields_that_others_add_to_a_statement_are_passed_over() -> None:
    value = json.loads(statement_bytes("Model/tag", FILES, KEY))
    value["predicate"]["card"] = {"author": "x"}
    del value["predicate"]["oscar_zoo"]
    found = SignatureFile.from_bytes(with_payload(json.dumps(value).encode()))
    assert found.files == FILES and found.key is None


@pytest.mark.parametrize("name", CASES)
def test_a_bad_file_is_refused_by_its_reason(name: str) -> None:
    reason, data = CASES[name]
    with pytest.raises(MalformedFile) as caught:
        SignatureFile.from_bytes(data)
    assert caught.value.reason == reason
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


def test_every_cut_of_a_good_file_is_refused() -> None:
    data = good().rstrip()
    for end in range(len(data)):
        with pytest.raises(MalformedFile):
            SignatureFile.from_bytes(data[:end])


def test_the_payload_is_kept_as_it_was_signed() -> None:
    value = json.loads(good())
    loose = json.dumps(json.loads(base64.b64decode(value["dsseEnvelope"]["payload"]))).encode()
    assert SignatureFile.from_bytes(with_payload(loose)).payload == loose
