"""What a listing says, whatever the hub sends, what its refusals mean, and where files and the
token go when it says where it wants them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo import errors
from oscar_zoo.registry.hubs.base import is_commit
from oscar_zoo.registry.hubs.modelscope import (
    MAX_ENTRIES,
    Listing,
    ModelScopeHub,
    Refused,
    address,
    data_in,
    name_of,
    parse_listing,
)

HEAD, OLDER = "83ee97c66e841048bedc5c02c15ce2f3ed259feb", "f194f50981eaaa6019bbec5049a4c7e1fd294110"
TITLE = "ModelScope org/zoo"


def entry(path: str = "m/t/k.pt", **other: Any) -> dict[str, Any]:
    return {"Path": path, "Type": "blob", "Size": 3, "Sha256": "ab" * 32, "Revision": OLDER} | other


def listing(*entries: Any, latest: Any = None, name: str = "master") -> Listing:
    return parse_listing({"Files": list(entries), "LatestCommitter": latest}, name, TITLE)


@pytest.mark.parametrize(
    ("latest", "commit"),
    [
        ({"Id": "", "ShortId": HEAD[:8]}, HEAD),
        ({"Id": HEAD, "ShortId": ""}, HEAD),
        ({"Id": OLDER}, OLDER),
        ({"Id": "1" * 40}, "1" * 40),
        ({"ShortId": "1111111"}, None),
        ({"ShortId": ""}, None),
        ({"ShortId": HEAD[:6]}, None),
        ({"ShortId": HEAD[:8].upper()}, None),
        ({"ShortId": 83}, None),
        ({"ShortId": "*" * 8}, None),
        ({}, None),
        (None, None),
        ("83ee97c6", None),
    ],
)
def test_the_commit_is_told_or_found_by_its_beginning(latest: Any, commit: str | None) -> None:
    odd = [entry("c", Revision=None), entry("d", Revision=7)]
    found = listing(entry("a", Revision=HEAD), entry("b"), *odd, latest=latest)
    assert found.commit == commit
    assert found.revision == commit or (commit is None and not is_commit(found.revision))


def test_without_a_commit_the_revision_is_the_name_and_changes_with_the_files() -> None:
    one, other = entry("a"), entry("b")
    revision = listing(one, other).revision
    assert name_of(revision) == "master" != revision
    assert listing(other, one).revision == revision
    changed = [
        listing(one, entry(*path, **other))
        for path, other in ((["c"], {}), (["b"], {"Size": 4}), (["b"], {"Sha256": ""}))
    ]
    assert len({found.revision for found in (*changed, listing(one))} | {revision}) == 5
    assert name_of(HEAD) == HEAD and name_of("v1.0") == "v1.0"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "no listing"),
        ([], "no listing"),
        ({}, "no listing"),
        ({"Files": {"Path": "a"}}, "no listing"),
        ({"Files": ["a"]}, "no listing"),
        ({"Files": [entry(Path=None)]}, "without path or size"),
        ({"Files": [entry(Size="3")]}, "without path or size"),
        ({"Files": [entry(Size=-1)]}, "without path or size"),
        ({"Files": [entry(Size=True)]}, "without path or size"),
        ({"Files": [entry(Size=3.0)]}, "without path or size"),
        ({"Files": [entry(Sha256="ab")]}, "sha256"),
        ({"Files": [entry(Sha256=["ab" * 32])]}, "sha256"),
        ({"Files": [entry(), entry()]}, "twice"),
        ({"Files": [entry(f"f{n}") for n in range(MAX_ENTRIES)]}, "3,000"),
    ],
)
def test_a_listing_that_makes_no_sense_or_may_be_cut_is_refused(data: Any, words: str) -> None:
    with pytest.raises(errors.HubUnreachable, match=words):
        parse_listing(data, "master", TITLE)


KEYS = "Files Path Type Size Sha256 Revision LatestCommitter Id ShortId".split()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=8) | st.just(HEAD),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
    ),
    max_leaves=30,
)


@given(JSON)
def test_any_json_is_a_listing_or_refused(data: Any) -> None:
    try:
        found = parse_listing(data, "master", TITLE)
    except errors.HubUnreachable:
        return
    assert all(path == file.path and file.size >= 0 for path, file in found.files.items())
    assert is_commit(found.revision) or name_of(found.revision) == "master"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<!DOCTYPE html>", "json.syntax"),
        (b"", "json.syntax"),
        (b'{"Code":200,"Da', "json.syntax"),
        (b'{"Code":200,"Code":200}', "json.duplicate_key"),
        (b"\xff", "json.encoding"),
        (b"[]", "envelope"),
        (b"null", "envelope"),
        (b'{"error":"no"}', "envelope"),
        (b'{"Code":200,"Success":true}', "envelope"),
    ],
)
def test_what_is_no_envelope_did_not_come_from_the_hub(body: bytes, words: str) -> None:
    with pytest.raises(errors.HubUnreachable, match=words):
        data_in(body, TITLE)


@pytest.mark.parametrize(
    ("status", "code", "sent_token", "error"),
    [
        (401, None, False, errors.LoginRequired),
        (401, 10010103009, True, errors.LoginRequired),
        (400, 10010103009, True, errors.LoginRequired),
        (403, None, False, errors.Forbidden),
        (403, 10010205001, True, errors.Forbidden),
        (404, 10010200001, False, errors.LoginRequired),
        (404, 10010200001, True, errors.Forbidden),
        (404, 10010205001, True, errors.RepositoryNotFound),
        (404, None, False, errors.RepositoryNotFound),
        (409, None, True, errors.StaleRevision),
        (400, 10030000001, True, errors.StaleRevision),
        (400, 10010200001, True, errors.HubUnreachable),
        (418, None, False, errors.HubUnreachable),
        (200, 10010000000, False, errors.HubUnreachable),
    ],
)
def test_a_refusal_becomes_one_line_of_ours(
    status: int, code: int | None, sent_token: bool, error: type[errors.OscarZooError]
) -> None:
    refused = Refused(status, code, sent_token=sent_token).as_error(TITLE, doing="reading")
    assert type(refused) is error
    assert TITLE in refused.message and "\n" not in refused.message and refused.hint
    if error is errors.HubUnreachable:
        assert str(status) in refused.message and (code is None or str(code) in refused.message)
    if error is errors.LoginRequired:
        assert "MODELSCOPE_API_TOKEN" in refused.hint
        assert ("refused the token" in refused.message) == sent_token


def test_nothing_in_a_name_leaves_its_place_in_an_address() -> None:
    url = address("http://h", "org/a b?c#d", "repo", Revision="v/1&x=2", FilePath="m/ü +.pt")
    query = "Revision=v%2F1%26x%3D2&FilePath=m%2F%C3%BC+%2B.pt"
    assert url == f"http://h/api/v1/models/org/a%20b%3Fc%23d/repo?{query}"


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
    pytest.importorskip("modelscope_hub")
    return ModelScopeHub("org/zoo").send(library, files, "Add")


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
    with pytest.raises(errors.HubUnreachable):
        commit(library, {"m/t/k.pt": b"k"})
    assert not library.uploads and not library.commits


def test_small_text_and_the_card_travel_inside_the_commit() -> None:
    library = Library("https://hub.example", None)
    edge = 64 << 10
    sizes = {"README.md": 2 * edge, "a.json": edge, "b.json": edge + 1, "k.pt": 0}
    commit(library, {path: b"x" * size for path, size in sizes.items()})
    assert {action["path"]: action["size"] for action in library.actions} == sizes
    large = [action["path"] for action in library.actions if action["type"] == "lfs"]
    assert large == ["b.json", "k.pt"]
    assert all(bool(action["sha256"]) != bool(action["content"]) for action in library.actions)
