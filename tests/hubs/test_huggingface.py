"""Hugging Face: what is read (commits, listings, content, refusals, tokens), and whole round trips
of writing with both versions of the client, in child processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from hub_uses import HUB_2, VERSIONS
from hub_wire import OPENSSL
from raw_server import RawServer, answer

from oscar_zoo import errors
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.hubs import huggingface
from oscar_zoo.registry.hubs.base import HubFile, Limits
from oscar_zoo.registry.hubs.huggingface import HuggingFaceHub

ROOT = Path(__file__).resolve().parents[2]
CANARY = "hf_canaryCANARY"
QWEN = ArtifactId("Qwen3-8B", "seq1_prompt1_group128")
K = bytes(range(256)) * 400
FILES = {
    f"{QWEN}/k.pt": K,
    f"{QWEN}/v.pt": K[::-1],
    f"{QWEN}/oscar.json": b'{"a": 1}',
    "Odd #1/tag/k?.pt": b"odd",
    "index.json": b"{}",
}
LIMITS = Limits(connect=20, read=20, tries=2)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub with `org/name`, and a client in this process that asks it without a token."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repository("org/name", files=FILES)
        yield server


def hub() -> HuggingFaceHub:
    return HuggingFaceHub("org/name", limits=LIMITS)


def listed(path: str) -> HubFile:
    return HubFile(path, len(FILES[path]), None)


def test_a_revision_is_resolved_to_its_commit(server: HubServer) -> None:
    repo = server.repository("org/name")
    first = repo.commits[-1].oid
    repo.tags["oz-a"] = repo.branches["feature/x"] = first
    second = repo.commit({"new": b"new"})
    assert hub().resolve(None) == hub().resolve("main") == second
    assert hub().resolve("oz-a") == hub().resolve("feature/x") == first
    server.clear()
    assert hub().resolve(first) == first
    assert server.requests == []
    with pytest.raises(errors.RevisionNotFound, match="Hugging Face org/name has no revision v9"):
        hub().resolve("v9")


@pytest.mark.parametrize("paged", [0, 1, 3])
def test_the_listing_has_every_file(server: HubServer, paged: int) -> None:
    server.paged = paged
    repo = server.repository("org/name")
    commit = repo.commits[-1]
    files = hub().listing(commit.oid)
    assert {path: (file.path, file.size) for path, file in files.items()} == {
        path: (path, len(data)) for path, data in commit.files.items()
    }
    for path, blob in commit.blobs.items():
        assert files[path].sha256 == (blob.sha256 if blob.lfs else None)
        assert files[path].git_oid == (None if blob.lfs else blob.git_oid)
    with pytest.raises(errors.RevisionNotFound):
        hub().listing("0" * 40)


def test_a_listing_of_too_many_pages_or_in_circles_ends(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.paged = 1
    commit = server.repository("org/name").commits[-1].oid
    monkeypatch.setattr(huggingface, "MAX_PAGES", 3)
    with pytest.raises(errors.HubUnreachable, match="more than 3 pages"):
        hub().listing(commit)
    row = '[{"type": "file", "path": "a", "size": 1, "oid": "%s"}]' % ("a" * 40)
    with RawServer(
        lambda c, _: c.sendall(answer(row.encode(), Link=f'<{circle.url}/a>; rel="next"'))
    ) as circle:
        monkeypatch.setenv("HF_ENDPOINT", circle.url)
        with pytest.raises(errors.HubUnreachable, match="names a file twice"):
            hub().listing(commit)
    monkeypatch.setattr(huggingface, "LISTING_SECONDS", 0)
    with pytest.raises(errors.HubTimeout):
        hub().listing(commit)


@pytest.mark.parametrize("redirect", [None, "same", "cdn"])
def test_files_are_read_wherever_the_hub_keeps_them(
    server: HubServer, redirect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    server.lfs_redirect = redirect
    commit = server.repository("org/name").commits[-1].oid
    for path, data in FILES.items():
        told: list[int] = []
        read = hub().read(commit, listed(path), limit=len(data), progress=told.append)
        assert read == data
        assert told[-1] == len(data)
    assert all(not record.credentials for record in server.requests if record.host == "cdn")
    assert all(record.credentials for record in server.requests if record.host == "origin")


@pytest.mark.parametrize(
    "header", ["X-Repo-Commit", "ETag", "Content-Length", "X-Linked-Etag", "X-Linked-Size"]
)
def test_no_header_that_a_proxy_may_drop_is_needed(server: HubServer, header: str) -> None:
    server.fault("drop_header", "*", name=header)
    assert hub().fetch(QWEN, "k.pt", limit=1 << 20) == K


@pytest.mark.parametrize(
    "kind, arguments",
    [
        ("html", {}),
        ("empty", {}),
        ("cut", {"after": 20}),
        ("status", {"code": 500}),
        ("redirect", {"to": "ftp://127.0.0.1/"}),
    ],
)
@pytest.mark.parametrize("path", ["/api/models/org/name", "/api/models/org/name/tree/*"])
def test_a_hub_that_makes_no_sense_counts_as_unreachable(
    server: HubServer, kind: str, arguments: dict[str, Any], path: str
) -> None:
    server.fault(kind, path, **arguments)
    with pytest.raises(errors.HubUnreachable, match="Hugging Face org/name"):
        hub().artifacts()


def test_a_listing_that_goes_on_elsewhere_gets_neither_request_nor_token(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    server.paged = 1
    server.url = server.cdn_url  # as when a mirror passes on what the hub said
    with pytest.raises(errors.HubUnreachable, match="goes on at another host"):
        hub().artifacts()
    assert all(record.host == "origin" for record in server.requests)


@pytest.mark.parametrize(
    "kind, token, error",
    [
        ({"private": True, "token": "hf_right"}, None, errors.LoginRequired),
        ({"private": True, "token": "hf_right"}, "hf_wrong", errors.LoginRequired),
        ({"gated": True, "token": "hf_right"}, None, errors.GatedRepository),
        ({"gated": True, "token": "hf_right"}, "hf_wrong", errors.GatedRepository),
        (None, None, errors.LoginRequired),
        (None, "hf_any", errors.RepositoryNotFound),
    ],
)
def test_private_gated_and_missing(
    server: HubServer,
    kind: dict[str, Any] | None,
    token: str | None,
    error: type[errors.OscarZooError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind is not None:
        server.repository("org/other", files=FILES, **kind)
    monkeypatch.setenv("HF_TOKEN", token or "")
    closed = HuggingFaceHub("org/other", limits=LIMITS)
    with pytest.raises(error, match="Hugging Face org/other"):
        closed.fetch(QWEN, "k.pt", limit=1 << 20)
    if kind is not None:
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        assert closed.fetch(QWEN, "k.pt", limit=1 << 20) == K


def test_where_the_token_comes_from(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.repository("org/closed", files=FILES, private=True, token="hf_right")

    def opens() -> bool:
        try:
            return bool(HuggingFaceHub("org/closed", limits=LIMITS).resolve(None))
        except errors.LoginRequired:
            return False

    assert not opens()
    monkeypatch.setenv("HF_TOKEN", " hf_right\n")
    assert opens()
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert not opens()
    monkeypatch.delenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text("hf_right\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    assert opens()
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path))
    with pytest.raises(errors.LoginRequired, match="the token for Hugging Face cannot be read"):
        HuggingFaceHub("org/name", limits=LIMITS).resolve(None)


START = """
import json, os, sys
from functools import partial
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import OscarZooError
from oscar_zoo.registry.hubs import huggingface
from oscar_zoo.registry.hubs.base import Change
from oscar_zoo.registry.hubs.base import Limits
LIMITS = Limits(connect=20, read=20)
ID = ArtifactId("Qwen3-8B", "seq1_prompt1_group128")
TOKEN = os.environ["HF_TOKEN"]
def hub(repo="org/new", revision=None):
    return huggingface.HuggingFaceHub(repo, revision, limits=LIMITS)
def change(parent, text="[]", artifact=ID, propose=False):
    files = {"k.pt": b"k" * 300_000, "v.pt": b"v" * 300_000, "oscar.json": b"{}"} if artifact else {}
    return Change(artifact, files, {"index.json": text.encode(), "README.md": b"# card"}, parent, "publish it", propose)
def fails(call, *arguments):
    try:
        return f"no error: {call(*arguments)}"
    except OscarZooError as error:
        link = error
        while link is not None:
            assert TOKEN not in f"{link!r} {vars(link)}" and not hasattr(link, "request"), link
            link = link.__cause__ or link.__context__
        return f"{type(error).__name__}: {error.message}"
found = {}
"""  # noqa: E501
END = "\nprint(json.dumps(found))\n"
TITLE = "Hugging Face org/new"


def child(
    server: HubServer, home: Path, version: int, code: str, *arguments: str
) -> dict[str, Any]:
    """What `code` put into `found`; it must say nothing else, and never its token."""
    environment = server.environment(home) | {
        "HF_TOKEN": CANARY,
        "OSCAR_ZOO_CACHE": str(home / "cache"),
    }
    path = [ROOT, HUB_2] if version == 2 else [ROOT]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, "-c", START + code + END, *arguments]
    quiet: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env=environment, cwd=home, **quiet)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1 and CANARY not in done.stdout
    return dict(json.loads(done.stdout))


ROUND_TRIP = """
new = hub()
found["missing"] = fails(new.artifacts)
new.create()
new.create()
first = new.revision
made = new.commit(change(first))
found |= {"made": made.revision, "proposal": made.proposal, "view": new.revision == first}
new.refresh()
found |= {"head": new.revision, "artifacts": list(map(str, new.artifacts()))}
found["same"] = all(new.fetch(ID, name, limit=1 << 20) == data for name, data in change(first).files.items())
found["root"] = [new.root_file("index.json").decode(), new.root_file("README.md").decode()]
new.tag("oz-a", made.revision, "words")
new.tag("oz-a", made.revision, "words")
new.tag("oz-b", None, "words")
found |= {"moved": fails(new.tag, "oz-a", first, "words"), "tagged": hub(revision="oz-a").revision}
found |= {"again": fails(new.commit, change(made.revision)), "stale": fails(new.commit, change(first, "[1]", None))}
offered = new.commit(change(made.revision, "[2]", None, propose=True))
found["nothing new"] = fails(new.commit, change(made.revision, "[]", None, propose=True))
found |= {"offered": offered.proposal, "offer": hub(revision=offered.revision).root_file("index.json").decode()}
new.refresh()
found["last"] = new.revision
"""  # noqa: E501


@pytest.mark.parametrize("version", VERSIONS)
def test_round_trip(server: HubServer, tmp_path: Path, version: int) -> None:
    found = child(server, tmp_path, version, ROUND_TRIP)
    repo = server.repository("org/new")
    created, published = repo.commits  # exactly one commit for one publish
    assert published.message == "publish it"
    version_files = {f"{QWEN}/{name}" for name in ("k.pt", "v.pt", "oscar.json")}
    assert published.files.keys() - created.files == version_files | {"index.json", "README.md"}
    assert found == {
        "missing": f"RepositoryNotFound: {TITLE} does not exist, or this account may not see it.",
        "made": published.oid,
        "proposal": None,
        "view": True,
        "head": published.oid,
        "artifacts": [str(QWEN)],
        "same": True,
        "root": ["[]", "# card"],
        "moved": (
            f"ConflictError: the tag oz-a of {TITLE} is on commit {published.oid}, not"
            f" {created.oid}."
        ),
        "tagged": published.oid,
        "again": f"StaleRevision: {QWEN} is already on {TITLE}.",
        "stale": f"StaleRevision: {TITLE} changed while this was being published.",
        "nothing new": (
            f"ConflictError: {TITLE} has all of this already: there is nothing to propose."
        ),
        "offered": f"{server.url}/org/new/discussions/1",
        "offer": "[2]",
        "last": published.oid,
    }
    assert repo.tags == {"oz-a": published.oid, "oz-b": published.oid}
    assert not any("xet" in record.path for record in server.requests)
    assert all(record.credentials == (record.method != "PUT") for record in server.requests)


OVER_TLS = """
there = hub("org/name")
found["cdn"] = len(there.fetch(ID, "k.pt", limit=1 << 20))
found["http"] = fails(partial(there.fetch, ID, "v.pt", limit=1 << 20))
found["file"] = len(there.fetch(ID, "oscar.json", limit=99))
os.environ["HF_ENDPOINT"] = sys.argv[1]
found["stranger"] = fails(hub("org/else").artifacts)
"""


@pytest.mark.skipif(OPENSSL is None, reason="no openssl to make a certificate with")
@pytest.mark.parametrize("version", VERSIONS)
def test_over_tls_redirects_stay_there(tmp_path: Path, version: int) -> None:
    with HubServer(tls=True) as server, HubServer(tls=True) as stranger:
        server.repository("org/name", files=FILES)
        server.fault("redirect", "*/k.pt", to="cdn")
        server.fault("redirect", "*/v.pt", to="http")
        found = child(server, tmp_path, version, OVER_TLS, stranger.url)
        elsewhere = [seen for seen in server.requests if seen.host != "origin"]
    unreachable = "HubUnreachable: Hugging Face org/{} cannot be reached: "
    assert found == {
        "cdn": len(K),
        "http": unreachable.format("name") + "it redirects to an unsafe address.",
        "file": 8,
        "stranger": unreachable.format("else") + "its certificate is not trusted.",
    }
    assert [(seen.host, seen.credentials) for seen in elsewhere] == [("cdn", False)]
    assert stranger.requests == []


READ_ONLY = "Forbidden: {} does not allow writing with this account."
STALE = "StaleRevision: {} changed while this was being published."
BROKEN = "HubUnreachable: {} cannot be reached: "
LATE = "HubTimeout: {} was not done with writing within 1 s."
TROUBLE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "org/refused": ("status", "*/commit/*", {"code": 401}, "LoginRequired: {} refused the token."),
    "org/read-only": ("status", "*/commit/*", {"code": 403}, READ_ONLY),
    "org/upload-refused": ("status", "/lfs/*", {"code": 403}, READ_ONLY),
    "org/vanished": ("status", "*/preupload/*", {"code": 404}, "RepositoryNotFound: {}"),
    "org/conflict": ("status", "*/commit/*", {"code": 409}, STALE),
    "org/second-writer": ("move", "*/commit/*", {}, STALE),
    "org/busy": ("status", "*/commit/*", {"code": 429}, "RateLimited: {}"),
    "org/broken": ("status", "*/commit/*", {"code": 500}, BROKEN + "it answers with status 500."),
    "org/lost-reply": ("lose_reply", "*/commit/*", {}, BROKEN + "the connection broke off."),
    "org/page": ("html", "*/commit/*", {}, BROKEN + "its answer makes no sense."),
    "org/silent-commit": ("black_hole", "*/commit/*", {}, LATE),
    "org/silent-upload": ("black_hole", "/lfs/*", {}, LATE),
}
TROUBLES = """
huggingface.http.WRITE_RATE = 1 << 40
for repo in sys.argv[1:]:
    huggingface.WRITE_SECONDS = 1 if "silent" in repo else 60
    there = hub(repo)
    found[repo] = fails(there.commit, change(there.revision))
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_each_trouble_of_writing_is_said(server: HubServer, tmp_path: Path, version: int) -> None:
    """Two uploads that never end are among them: they must not keep the process alive either."""
    for repo_id, (kind, path, arguments, _) in TROUBLE.items():
        repo = server.repository(repo_id)
        if kind == "move":
            arguments = {"call": partial(repo.commit, {"other": b"of somebody else"})}
        where = path.replace("*/", f"*/{repo_id}/").replace("/lfs/", f"/lfs/hf/{repo_id}/")
        server.fault(kind, where, **arguments)
    found = child(server, tmp_path, version, TROUBLES, *TROUBLE)
    for repo_id, (_, _, _, sentence) in TROUBLE.items():
        assert found[repo_id].startswith(sentence.format(f"Hugging Face {repo_id}")), found[repo_id]
    heads = {repo_id: server.repository(repo_id).commits[-1].files for repo_id in TROUBLE}
    assert [repo_id for repo_id in heads if f"{QWEN}/k.pt" in heads[repo_id]] == ["org/lost-reply"]


ODD = """
there = hub("org/there")
server = os.environ["HF_ENDPOINT"]
found["card"] = fails(there.commit, change(there.revision))
found["no proposal"] = fails(there.commit, change(there.revision, propose=True))
there, odd = hub("org/there"), hub("org/odd")
found["no commit"] = fails(odd.commit, change(odd.revision))
def at(address):
    os.environ["HF_ENDPOINT"] = address
    return fails(hub("org/there").create)
found["clear"] = at("http://user:secret@hub.example:8080")
found["address"] = at("ftp://hub.example")
found["closed"] = at(sys.argv[1])
os.environ["HF_ENDPOINT"], os.environ["HF_TOKEN"] = server, "two words"
found["token"] = fails(there.create)
del os.environ["HF_TOKEN"]
found["stranger"] = fails(there.create)
os.environ["HF_TOKEN"] = TOKEN
found["name"] = fails(hub("org/a..b").create)
import huggingface_hub
huggingface_hub.constants.HF_HUB_OFFLINE = True
found["offline"] = fails(there.create)
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_odd_answers_and_settings(server: HubServer, tmp_path: Path, version: int) -> None:
    for repo_id, oid in (("org/there", "a" * 40), ("org/odd", "none")):
        server.repository(repo_id)
        body = json.dumps({"commitUrl": "https://hub.example/commit", "commitOid": oid})
        server.fault("status", f"*/{repo_id}/commit/*", code=200, body=body)
    refusal = '{"errors": [{"message": "bad"}], "warnings": []}'
    server.fault("status", "*/validate-yaml", 1, code=400, body=refusal)
    found = child(server, tmp_path, version, ODD, server.closed_port())
    title = "Hugging Face org/there"
    broken = f"HubUnreachable: {title} cannot be reached: "
    assert found == {
        "no proposal": broken + "its answer makes no sense.",
        "no commit": broken.replace("there", "odd") + "its answer makes no sense.",
        "card": f"UsageError: {title} does not take the metadata at the top of README.md.",
        "clear": "UsageError: the hub's address, http://hub.example, is no https address.",
        "address": "UsageError: the hub's address, ftp://hub.example, is no https address.",
        "closed": broken + "connection refused.",
        "token": f"LoginRequired: the token for {title} has characters that no token has.",
        "stranger": f"LoginRequired: {title} takes changes from users only.",
        "name": "UsageError: 'org/a..b' is no repository of Hugging Face.",
        "offline": f"OfflineError: {title} is not asked: HF_HUB_OFFLINE is set.",
    }
