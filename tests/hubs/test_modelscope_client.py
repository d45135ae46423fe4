"""Where files and the token go when ModelScope says where it wants them; the library itself is
recorded, not asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from oscar_zoo.errors import HubUnreachable
from oscar_zoo.registry.hubs.modelscope_wire import Client

pytest.importorskip("modelscope_hub")

WITH_TOKEN: dict[str, None] = {}
WITHOUT: dict[str, None] = {"Authorization": None, "Cookie": None}


@dataclass
class Library:
    """`HubApi` and its `legacy` in one: wants every file at `wanted`, and keeps what it was told to
    do."""

    endpoint: str
    wanted: str | None
    uploads: list[tuple[str, bytes, Mapping[str, None]]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    commits: int = 0

    @property
    def legacy(self) -> Library:
        return self

    def validate_blobs(
        self, repo: str, kind: str, objects: list[dict[str, Any]]
    ) -> dict[str, str | None]:
        return {one["oid"]: self.wanted for one in objects}

    def upload_blob(
        self, address: str, data: bytes, size: int, *, headers: Mapping[str, None]
    ) -> None:
        assert len(data) == size
        self.uploads.append((address, data, headers))

    def create_commit(
        self, repo: str, kind: str, actions: list[Any], message: str, *, revision: str
    ) -> dict[str, str]:
        self.commits += 1
        self.actions += actions
        return {"oid": "not a commit", "CommitId": "a" * 40}


def commit(library: Library, files: Mapping[str, bytes]) -> str | None:
    return Client(library, "org/zoo", title="ModelScope org/zoo").commit(files, "Add", "master")


@pytest.mark.parametrize(
    ("endpoint", "address", "headers"),
    [
        ("https://hub.example", "https://hub.example/lfs/1", WITH_TOKEN),
        ("https://hub.example", "https://HUB.example:443/lfs/1", WITH_TOKEN),
        ("https://hub.example", "https://lfs.hub.example/1", WITH_TOKEN),
        ("https://www.hub.example", "https://lfs.hub.example/1", WITH_TOKEN),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/1", WITH_TOKEN),
        ("https://hub.example", "https://hub.example:444/lfs/1", WITHOUT),
        ("https://hub.example", "https://evilhub.example/1", WITHOUT),
        ("https://hub.example", "https://hub.example.evil.example/1", WITHOUT),
        ("https://hub.example", "https://evil.example/?hub.example", WITHOUT),
        ("https://hub.example", "https://hub.example@evil.example/1", WITHOUT),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8001/1", WITHOUT),
        ("http://127.0.0.1:8000", "https://127.0.0.1:8000/1", WITHOUT),
    ],
)
def test_the_token_goes_to_the_hub_and_below_it(
    endpoint: str, address: str, headers: Mapping[str, None]
) -> None:
    library = Library(endpoint, address)
    assert commit(library, {"m/t/k.pt": b"k"}) == "a" * 40
    assert library.uploads == [(address, b"k", headers)]


@pytest.mark.parametrize(
    "address",
    ["http://hub.example/1", "http://evil.example/1", "ftp://hub.example/1", "/1", "", "http://["],
)
def test_a_file_is_not_sent_in_the_open_or_nowhere(address: str) -> None:
    library = Library("https://hub.example", address)
    with pytest.raises(HubUnreachable):
        commit(library, {"m/t/k.pt": b"k"})
    assert not library.uploads and not library.commits


def test_small_text_and_the_card_travel_inside_the_commit() -> None:
    library = Library("https://hub.example", None)
    edge = 64 << 10
    files = {
        "README.md": b"c" * 2 * edge,
        "a.json": b"a" * edge,
        "b.json": b"b" * (edge + 1),
        "k.pt": b"",
    }
    commit(library, files)
    assert {action["path"]: action["type"] for action in library.actions} == {
        "README.md": "normal",
        "a.json": "normal",
        "b.json": "lfs",
        "k.pt": "lfs",
    }
    assert all(bool(action["sha256"]) != bool(action["content"]) for action in library.actions)
    assert {action["path"]: action["size"] for action in library.actions} == {
        p: len(d) for p, d in files.items()
    }
