"""One row per kind of hub says everything that differs between kinds."""

from __future__ import annotations

from typing import get_args

import pytest

from oscar_zoo.artifact.manifest import HubScheme
from oscar_zoo.registry.hubs.table import HUBS


def test_only_kinds_with_an_address_are_remote_and_have_tokens() -> None:
    remote = {scheme for scheme, kind in HUBS.items() if kind.is_remote}
    assert {"hf", "ms"} <= remote and "file" not in remote
    for scheme, kind in HUBS.items():
        assert (kind.credential is not None) == bool(kind.token_step)
        assert kind.credential is None or scheme in remote


def test_manifests_may_name_every_kind_that_copies_are_made_from() -> None:
    """`mirror` writes into the index of the copy on which remote hub the artifact was."""
    assert {*get_args(HubScheme)} == {scheme for scheme, kind in HUBS.items() if kind.is_remote}


def test_a_token_comes_from_a_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    find = HUBS["ms"].credential
    assert find is not None
    found = find()
    assert found is not None and found.source == "MODELSCOPE_API_TOKEN" and found.is_variable
    assert "secret" not in repr(found)
