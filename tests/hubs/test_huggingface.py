"""Reading Hugging Face: commits, listings, content, refusals, tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from huggingface_zoo import CANARY, FILES, QWEN, K, running_hub
from raw_server import RawServer, answer

from oscar_zoo.errors import (
    GatedRepository,
    HubTimeout,
    HubUnreachable,
    LoginRequired,
    OscarZooError,
    RepositoryNotFound,
    RevisionNotFound,
)
from oscar_zoo.registry.hubs import huggingface
from oscar_zoo.registry.hubs.base import HubFile
from oscar_zoo.registry.hubs.http import Limits
from oscar_zoo.registry.hubs.huggingface import HuggingFaceSource, open_huggingface
from oscar_zoo.registry.hubs.remote import RemoteHub

LIMITS = Limits(connect=20, read=20, tries=2)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub(monkeypatch) as server:
        yield server


def source(**changes: Any) -> HuggingFaceSource:
    return HuggingFaceSource("org/name", limits=LIMITS, **changes)


def listed(path: str) -> HubFile:
    return HubFile(path, len(FILES[path]), None)


def test_a_revision_is_resolved_to_its_commit(server: HubServer) -> None:
    repo = server.repository("org/name")
    first = repo.commits[-1].oid
    repo.tags["oz-a"] = repo.branches["feature/x"] = first
    second = repo.commit({"new": b"new"})
    assert source().resolve(None) == source().resolve("main") == second
    assert source().resolve("oz-a") == source().resolve("feature/x") == first
    server.clear()
    assert source().resolve(first) == first
    assert server.requests == []
    with pytest.raises(RevisionNotFound, match="Hugging Face org/name has no revision v9"):
        source().resolve("v9")


@pytest.mark.parametrize("paged", [0, 1, 3])
def test_the_listing_has_every_file(server: HubServer, paged: int) -> None:
    server.paged = paged
    repo = server.repository("org/name")
    commit = repo.commits[-1]
    files = source().listing(commit.oid)
    assert {path: (file.path, file.size) for path, file in files.items()} == {
        path: (path, len(data)) for path, data in commit.files.items()
    }
    for path, blob in commit.blobs.items():
        assert files[path].sha256 == (blob.sha256 if blob.lfs else None)
        assert files[path].git_oid == (None if blob.lfs else blob.git_oid)
    with pytest.raises(RevisionNotFound):
        source().listing("0" * 40)


def test_a_listing_of_too_many_pages_or_in_circles_ends(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.paged = 1
    commit = server.repository("org/name").commits[-1].oid
    monkeypatch.setattr(huggingface, "MAX_PAGES", 3)
    with pytest.raises(HubUnreachable, match="more than 3 pages"):
        source().listing(commit)
    row = '[{"type": "file", "path": "a", "size": 1, "oid": "%s"}]' % ("a" * 40)
    with RawServer(
        lambda c, _: c.sendall(answer(row.encode(), Link=f'<{circle.url}/a>; rel="next"'))
    ) as circle:
        with pytest.raises(HubUnreachable, match="names a file twice"):
            source(endpoint=circle.url).listing(commit)
    monkeypatch.setattr(huggingface, "LISTING_SECONDS", 0)
    with pytest.raises(HubTimeout):
        source().listing(commit)


@pytest.mark.parametrize("redirect", [None, "same", "cdn"])
def test_files_are_read_wherever_the_hub_keeps_them(server: HubServer, redirect: Any) -> None:
    server.lfs_redirect = redirect
    commit = server.repository("org/name").commits[-1].oid
    for path, data in FILES.items():
        told: list[int] = []
        read = source(token=CANARY).read
        assert read(commit, listed(path), limit=len(data), progress=told.append) == data
        assert told[-1] == len(data)
    assert all(not record.credentials for record in server.requests if record.host == "cdn")
    assert all(record.credentials for record in server.requests if record.host == "origin")


@pytest.mark.parametrize(
    "header", ["X-Repo-Commit", "ETag", "Content-Length", "X-Linked-Etag", "X-Linked-Size"]
)
def test_no_header_that_a_proxy_may_drop_is_needed(server: HubServer, header: str) -> None:
    server.fault("drop_header", "*", name=header)
    assert RemoteHub(source()).fetch(QWEN, "k.pt", limit=1 << 20) == K


@pytest.mark.parametrize(
    "kind, arguments, words",
    [
        ("html", {}, "it sends a web page instead of JSON"),
        ("empty", {}, "it sends an empty answer instead of JSON"),
        ("cut", {"after": 20}, "the connection broke off"),
        ("reset", {}, "the connection broke off"),
        ("status", {"code": 500}, "it answers with status 500"),
        ("redirect", {"to": "ftp://127.0.0.1/"}, "it redirects to an unsafe address"),
    ],
)
@pytest.mark.parametrize("path", ["/api/models/org/name", "/api/models/org/name/tree/*"])
def test_a_hub_that_makes_no_sense_counts_as_unreachable(
    server: HubServer, kind: str, arguments: dict[str, Any], words: str, path: str
) -> None:
    server.fault(kind, path, **arguments)
    with pytest.raises(HubUnreachable, match=f"Hugging Face org/name cannot be reached: {words}"):
        open_huggingface("org/name", limits=LIMITS).artifacts()


def test_a_listing_that_goes_on_elsewhere_gets_neither_request_nor_token(server: HubServer) -> None:
    server.paged = 1
    server.url, home = server.cdn_url, server.url  # as when a mirror passes on what the hub said
    with pytest.raises(HubUnreachable, match="goes on at another host"):
        RemoteHub(source(endpoint=home, token=CANARY)).artifacts()
    assert all(record.host == "origin" for record in server.requests)


def test_a_hub_that_falls_silent_is_given_up(server: HubServer) -> None:
    commit = server.repository("org/name").commits[-1].oid
    server.fault("black_hole")
    asked = HuggingFaceSource("org/name", limits=Limits(read=0.3))
    for call in (
        lambda: asked.resolve(None),
        lambda: asked.listing(commit),
        lambda: asked.read(commit, listed(f"{QWEN}/k.pt"), limit=1 << 20),
    ):
        with pytest.raises(HubTimeout, match=r"fell silent|was not done"):
            call()


def test_two_hundred_random_troubles_give_the_content_or_an_error(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the listed bytes ever comes out, whatever happens to requests one after the
    other."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between tries
    rng = random.Random(0)
    good = 0
    for _ in range(200):
        server.clear_faults()
        faults: list[tuple[str, dict[str, Any]]] = [
            ("flip", {"at": rng.randrange(8)}),
            ("cut", {"after": rng.randrange(8)}),
            ("reset", {"after": rng.randrange(8)}),
            ("extra", {"n": 3, "honest": rng.random() < 0.5}),
            ("wrong_length", {"by": rng.choice([-3, 2])}),
            ("status", {"code": rng.choice([429, 500, 503]), "retry_after": 0}),
            ("lfs_pointer", {}),
            ("swap", {"other": "index.json"}),
            ("html", {}),
            ("empty", {}),
        ]
        kind, arguments = rng.choice(faults)
        where = rng.choice(["*/oscar.json", "*/tree/*"])
        server.fault(kind, where, rng.randrange(4), **arguments)
        # Nothing of this commit is kept yet.
        server.repository("org/name").commit({"again": rng.randbytes(8)})
        try:
            hub = RemoteHub(source())
            assert hub.fetch(QWEN, "oscar.json", limit=99) == b'{"a": 1}'
            good += 1
        except OscarZooError as error:
            assert "Hugging Face org/name" in error.message
    assert 100 < good < 200


@pytest.mark.parametrize(
    "kind, token, error",
    [
        ({"private": True, "token": "hf_right"}, None, LoginRequired),
        ({"private": True, "token": "hf_right"}, "hf_wrong", LoginRequired),
        ({"gated": True, "token": "hf_right"}, None, GatedRepository),
        ({"gated": True, "token": "hf_right"}, "hf_wrong", GatedRepository),
        (None, None, LoginRequired),
        (None, "hf_any", RepositoryNotFound),
    ],
)
def test_private_gated_and_missing(
    server: HubServer, kind: dict[str, Any] | None, token: str | None, error: type[OscarZooError]
) -> None:
    if kind is not None:
        server.repository("org/other", files=FILES, **kind)
    closed = HuggingFaceSource("org/other", token=token, limits=LIMITS)
    with pytest.raises(error, match="Hugging Face org/other"):
        RemoteHub(closed).fetch(QWEN, "k.pt", limit=1 << 20)
    if kind is not None:
        right = HuggingFaceSource("org/other", token="hf_right", limits=LIMITS)
        assert RemoteHub(right).fetch(QWEN, "k.pt", limit=1 << 20) == K


def test_where_the_token_comes_from(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.repository("org/closed", files=FILES, private=True, token="hf_right")

    def opens(**changes: Any) -> bool:
        try:
            return bool(HuggingFaceSource("org/closed", limits=LIMITS, **changes).resolve(None))
        except LoginRequired:
            return False

    assert not opens()
    assert opens(token="hf_right")
    monkeypatch.setenv("HF_TOKEN", " hf_right\n")
    assert opens()
    assert not opens(token="hf_wrong")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert not opens()
    assert opens(token="hf_right")
    monkeypatch.delenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text("hf_right\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    assert opens()
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path))
    with pytest.raises(LoginRequired, match="the token for Hugging Face cannot be read"):
        HuggingFaceSource("org/name", limits=LIMITS).resolve(None)
