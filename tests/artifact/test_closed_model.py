"""Documents of others become frozen models, and every reader words a malformed one alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tiny_artifacts import manifest, payload

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.errors import MalformedFile
from oscar_zoo.registry.catalog import KnownDigests, TrustedKeys, packaged_digests, packaged_keys
from oscar_zoo.registry.index import Index

DOCUMENTS: dict[str, tuple[Callable[..., object], bytes]] = {
    "known_digests": (KnownDigests.from_bytes, packaged_digests().to_bytes()),
    "trusted_keys": (
        TrustedKeys.from_bytes,
        packaged_keys().model_dump_json(by_alias=True).encode(),
    ),
    "manifest": (Manifest.from_bytes, manifest(payload()).to_bytes()),
    "index": (Index.from_bytes, Index.empty().to_bytes()),
}


def refused(name: str, change: Callable[[dict[str, Any]], None]) -> MalformedFile:
    """The error for a document that was changed."""
    read, data = DOCUMENTS[name]
    value = json.loads(data)
    change(value)
    with pytest.raises(MalformedFile) as caught:
        read(json.dumps(value).encode(), what="the file")
    return caught.value


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_unknown_key_is_named_with_its_place(name: str) -> None:
    error = refused(name, lambda value: value.update(more=1))
    assert error.reason == f"{name}.schema"
    assert error.message == "the file: more: Extra inputs are not permitted."


def test_a_rule_of_ours_is_told_in_its_own_words() -> None:
    error = refused("known_digests", lambda value: value["artifacts"].reverse())
    assert error.message == "the file: artifacts must be sorted by id and unique without case."
