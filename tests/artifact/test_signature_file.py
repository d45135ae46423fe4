"""The format of signature files: what is written is read, and what strangers may write is
bounded."""

from __future__ import annotations

import base64
import json

import hostile_signatures
import pytest
from hostile_signatures import FILES, KEY, good, with_payload

from oscar_zoo.artifact.signature_file import (
    SignatureFile,
    pre_authentication,
    statement_bytes,
)
from oscar_zoo.errors import MalformedFile

CASES = {name: (reason, data) for name, reason, data in hostile_signatures.cases()}


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
