"""ModelScope read at one commit, from the site that has it, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_repositories import Repository
from hub_server import HubServer
from modelscope_zoo import (
    CANARY,
    FILES,
    ID,
    LISTING,
    OTHER,
    ROTATION,
    addition,
    isolate,
    open_zoo,
    posts,
    without_commits,
)

from oscar_zoo.errors import (
    AccessError,
    Forbidden,
    HubTimeout,
    HubUnreachable,
    IntegrityError,
    LoginRequired,
    NotFoundError,
    OscarZooError,
    RateLimited,
    RepositoryNotFound,
    RevisionNotFound,
    StaleRevision,
)
from oscar_zoo.registry.hubs import modelscope
from oscar_zoo.registry.hubs.modelscope import open_modelscope


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
        yield server


@pytest.fixture
def repo(server: HubServer) -> Repository:
    return server.repository("org/zoo", "ms", files=FILES)


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", CANARY)
    return CANARY


def test_a_view_stays_at_its_commit_until_it_is_refreshed(repo: Repository) -> None:
    hub, first = open_zoo(), repo.head()
    assert (hub.name, hub.title, hub.revision) == ("ms:org/zoo", "ModelScope org/zoo", first)
    repo.commit({f"{ID}/k.pt": b"new", "index.json": b"new", f"{OTHER}/k.pt": b"k"})
    assert hub.artifacts() == (ID,)
    assert [file.path for file in hub.files(ID)] == ["k.pt", "oscar.json"]
    assert hub.fetch(ID, "k.pt", limit=1 << 20) == ROTATION
    assert hub.root_file("index.json") == FILES["index.json"]
    hub.refresh()
    assert (hub.revision, hub.artifacts()) == (repo.head(), (ID, OTHER))
    assert hub.fetch(ID, "k.pt", limit=1 << 20) == b"new"
    assert hub.at(first).fetch(ID, "k.pt", limit=1 << 20) == ROTATION


def test_a_hub_that_tells_no_commits_is_still_a_view_that_does_not_move(
    server: HubServer, repo: Repository, token: str
) -> None:
    server.fault("status", LISTING, code=200, body=without_commits(FILES))
    hub = open_zoo()
    revision = hub.revision
    assert revision.startswith("master~")
    assert hub.fetch(ID, "k.pt", limit=1 << 20) == ROTATION
    server.fault("status", LISTING, code=200, body=without_commits(FILES | {"index.json": b"new"}))
    assert hub.at(revision).artifacts() == (ID,)  # still in mind
    with pytest.raises(StaleRevision):
        hub.commit(addition(revision))
    with pytest.raises(RevisionNotFound):
        open_zoo().at(revision).artifacts()
    hub.refresh()
    assert hub.revision.startswith("master~") and hub.revision != revision


def test_large_files_come_from_elsewhere_without_the_token(
    server: HubServer, repo: Repository, token: str
) -> None:
    server.lfs_redirect = "cdn"
    assert open_zoo().fetch(ID, "k.pt", limit=1 << 20) == ROTATION
    sent = {record.host: record.credentials for record in server.requests}
    assert sent == {"origin": True, "cdn": False}


@pytest.mark.parametrize("lie", [("flip", {"at": 5}), ("empty", {}), ("lfs_pointer", {})])
def test_a_changed_index_is_fetched_again_and_then_refused(
    server: HubServer, repo: Repository, lie: tuple[str, dict[str, int]]
) -> None:
    server.fault(lie[0], "*FilePath=index.json", times=1, **lie[1])
    assert open_zoo().root_file("index.json") == FILES["index.json"]
    server.fault(lie[0], "*FilePath=README.md", **lie[1])
    with pytest.raises(IntegrityError):
        open_zoo().root_file("README.md")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"kind": "status", "code": 401}, LoginRequired),
        ({"kind": "status", "code": 403}, Forbidden),
        ({"kind": "status", "code": 404, "error_code": 10010200001}, LoginRequired),
        ({"kind": "status", "code": 404, "error_code": 10010205001}, RepositoryNotFound),
        ({"kind": "status", "code": 404, "body": "<html>"}, RepositoryNotFound),
        ({"kind": "status", "code": 429}, RateLimited),
        ({"kind": "status", "code": 500}, HubUnreachable),
        ({"kind": "status", "code": 200, "error_code": 10010000000}, HubUnreachable),
        ({"kind": "html"}, HubUnreachable),
        ({"kind": "cut", "after": 40}, HubUnreachable),
        ({"kind": "reset"}, HubUnreachable),
        ({"kind": "black_hole"}, HubTimeout),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_listing_that_does_not_come_is_an_error_of_ours(
    server: HubServer, repo: Repository, fault: dict[str, Any], error: type[OscarZooError]
) -> None:
    server.fault(path=LISTING, **fault)
    hub = open_zoo(read=0.3) if fault["kind"] == "black_hole" else open_zoo()
    with pytest.raises(OscarZooError) as caught:
        hub.artifacts()
    assert type(caught.value) is error
    assert "injected" not in str(caught.value) and "ModelScope org/zoo" in str(caught.value)


def test_what_is_missing_is_named(server: HubServer, repo: Repository) -> None:
    with pytest.raises(RepositoryNotFound):
        open_modelscope("org/none").artifacts()
    with pytest.raises(RepositoryNotFound):
        open_modelscope("org/none", "v1").artifacts()
    for revision in ("v1", "0" * 40):
        with pytest.raises(RevisionNotFound, match=revision):
            open_zoo(revision).artifacts()
    server.fault("status", LISTING, code=404, error_code=10010205001)
    with pytest.raises(RevisionNotFound, match="v1"):
        open_zoo("v1").artifacts()
    server.clear_faults()
    server.fault("status", "*FilePath=*", code=404)
    with pytest.raises(NotFoundError, match=r"k\.pt"):
        open_zoo().fetch(ID, "k.pt", limit=1 << 20)


def test_private_and_gated_repositories(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repository("org/zoo", "ms", private=True, token=CANARY, files=FILES)
    server.repository("org/gated", "ms", gated=True, token=CANARY, files=FILES)
    with pytest.raises((RepositoryNotFound, LoginRequired)) as caught:
        open_zoo().artifacts()
    assert "MODELSCOPE_API_TOKEN" in str(caught.value.hint)
    with pytest.raises(AccessError):
        open_modelscope("org/gated").fetch(ID, "k.pt", limit=1 << 20)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-wrong")
    with pytest.raises(LoginRequired, match="refused the token"):
        open_zoo().artifacts()
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", CANARY)
    assert open_zoo().fetch(ID, "k.pt", limit=1 << 20) == ROTATION
    assert open_modelscope("org/gated").fetch(ID, "k.pt", limit=1 << 20) == ROTATION


def test_the_second_public_site_is_asked_without_token_when_the_first_has_no_such_repository(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    with HubServer() as first, HubServer() as second:
        monkeypatch.setattr(modelscope, "SITES", (first.url, second.url))
        second.repository("org/zoo", "ms", files=FILES)
        hub = open_zoo()
        assert hub.fetch(ID, "k.pt", limit=1 << 20) == ROTATION
        assert [record.credentials for record in first.requests] == [True]
        assert {record.credentials for record in second.requests} == {False}
        with pytest.raises(LoginRequired):
            hub.commit(addition(hub.revision))
        assert not posts(first) and not posts(second)
        with pytest.raises(RepositoryNotFound):
            open_modelscope("org/none").artifacts()
        second.clear()
        first.fault("status", LISTING, code=503)
        with pytest.raises(HubUnreachable):
            open_zoo().artifacts()
        first.fault("status", LISTING, code=403)
        with pytest.raises(Forbidden):
            open_zoo().artifacts()
        assert not second.requests
        monkeypatch.setenv("MODELSCOPE_PREFER_AI_SITE", "true")
        assert open_zoo().artifacts() == (ID,)
        assert [record.credentials for record in second.requests] == [True]


@pytest.mark.parametrize(
    "variables",
    [
        {"MODELSCOPE_ENDPOINT": "http://127.0.0.1:8/"},
        {"MODELSCOPE_ENDPOINT": "hub.example", "MODELSCOPE_DOMAIN": "other.example"},
        {"MODELSCOPE_ENDPOINT": "HTTPS://hub.example//"},
        {"MODELSCOPE_DOMAIN": "other.example"},
        {"MODELSCOPE_ENDPOINT": "", "MODELSCOPE_DOMAIN": "http://other.example"},
        {},
    ],
)
@pytest.mark.filterwarnings("ignore:Environment variable MODELSCOPE_DOMAIN:FutureWarning")
def test_the_address_is_that_of_the_client(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    hub_config = pytest.importorskip("modelscope_hub").HubConfig
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert modelscope.ModelScopeSource("org/zoo").key.split()[1] == hub_config(token="").endpoint
