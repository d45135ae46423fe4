"""ModelScope over real HTTP: read at one commit, from the site that has it; written in one commit,
through its real client, against a hub that lies, refuses or falls silent."""

import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hub_repositories import Repository
from hub_server import HubServer

from oscar_zoo import errors
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.hubs import modelscope
from oscar_zoo.registry.hubs.base import Change, Limits
from oscar_zoo.registry.hubs.modelscope import ModelScopeHub
from oscar_zoo.registry.hubs.remote import RemoteHub

ID = ArtifactId("Tiny", "seq8_prompt1_group8")
OTHER = ArtifactId("Tiny", "seq9_prompt1_group8")
ROTATION = bytes(range(256)) * 40
FILES = {
    f"{ID}/k.pt": ROTATION,
    f"{ID}/oscar.json": b"{}",
    "index.json": b'{"serial":1}',
    "README.md": b"# Zoo\n",
}
CANARY = "ms-canary-CANARY"
LISTING, COMMIT = "*/repo/files*", "*/commit/*"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of the developer, a home of our own, and a client that may ask loopback."""
    for name in list(os.environ):
        if name.startswith("MODELSCOPE_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


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


def open_zoo(revision: str | None = None, **limits: Any) -> RemoteHub:
    """The zoo as a hub that is asked once."""
    return ModelScopeHub("org/zoo", revision, limits=Limits(**{"tries": 1, "read": 20} | limits))


def addition(parent: str | None, **other: Any) -> Change:
    """One more artifact, and an index that has it."""
    files, root = {"k.pt": ROTATION[::-1], "oscar.json": b"[]"}, {"index.json": b'{"serial":2}'}
    given = {"artifact": OTHER, "files": files, "root": root, "parent": parent, "message": "Add"}
    return Change(**given | other)


def posts(server: HubServer) -> list[str]:
    """Paths of the requests that write."""
    return [record.path for record in server.requests if record.method == "POST"]


def without_commits(files: Mapping[str, bytes]) -> str:
    """What a hub lists that does not tell its commits."""
    entries = [
        {"Path": path, "Type": "blob", "Size": len(data), "Sha256": sha256_hex(data)}
        for path, data in files.items()
    ]
    return json.dumps({"Code": 200, "Success": True, "Data": {"Files": entries}})


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
    with pytest.raises(errors.StaleRevision):
        hub.commit(addition(revision))
    with pytest.raises(errors.RevisionNotFound):
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


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"kind": "status", "code": 401}, errors.LoginRequired),
        ({"kind": "status", "code": 403}, errors.Forbidden),
        ({"kind": "status", "code": 404, "error_code": 10010200001}, errors.LoginRequired),
        ({"kind": "status", "code": 404, "error_code": 10010205001}, errors.RepositoryNotFound),
        ({"kind": "status", "code": 404, "body": "<html>"}, errors.RepositoryNotFound),
        ({"kind": "status", "code": 429}, errors.RateLimited),
        ({"kind": "status", "code": 500}, errors.HubUnreachable),
        ({"kind": "status", "code": 200, "error_code": 10010000000}, errors.HubUnreachable),
        ({"kind": "html"}, errors.HubUnreachable),
        ({"kind": "cut", "after": 40}, errors.HubUnreachable),
        ({"kind": "reset"}, errors.HubUnreachable),
        ({"kind": "black_hole"}, errors.HubTimeout),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_listing_that_does_not_come_is_an_error_of_ours(
    server: HubServer, repo: Repository, fault: dict[str, Any], error: type[errors.OscarZooError]
) -> None:
    server.fault(path=LISTING, **fault)
    hub = open_zoo(read=0.3) if fault["kind"] == "black_hole" else open_zoo()
    with pytest.raises(errors.OscarZooError) as caught:
        hub.artifacts()
    assert type(caught.value) is error
    assert "injected" not in str(caught.value) and "ModelScope org/zoo" in str(caught.value)


def test_what_is_missing_is_named(server: HubServer, repo: Repository) -> None:
    with pytest.raises(errors.RepositoryNotFound):
        ModelScopeHub("org/none").artifacts()
    with pytest.raises(errors.RepositoryNotFound):
        ModelScopeHub("org/none", "v1").artifacts()
    for revision in ("v1", "0" * 40):
        with pytest.raises(errors.RevisionNotFound, match=revision):
            open_zoo(revision).artifacts()
    server.fault("status", LISTING, code=404, error_code=10010205001)
    with pytest.raises(errors.RevisionNotFound, match="v1"):
        open_zoo("v1").artifacts()
    server.clear_faults()
    server.fault("status", "*FilePath=*", code=404)
    with pytest.raises(errors.NotFoundError, match=r"k\.pt"):
        open_zoo().fetch(ID, "k.pt", limit=1 << 20)


def test_private_and_gated_repositories(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repository("org/zoo", "ms", private=True, token=CANARY, files=FILES)
    server.repository("org/gated", "ms", gated=True, token=CANARY, files=FILES)
    with pytest.raises((errors.RepositoryNotFound, errors.LoginRequired)) as caught:
        open_zoo().artifacts()
    assert "MODELSCOPE_API_TOKEN" in str(caught.value.hint)
    with pytest.raises(errors.AccessError):
        ModelScopeHub("org/gated").fetch(ID, "k.pt", limit=1 << 20)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-wrong")
    with pytest.raises(errors.LoginRequired, match="refused the token"):
        open_zoo().artifacts()
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", CANARY)
    assert open_zoo().fetch(ID, "k.pt", limit=1 << 20) == ROTATION
    assert ModelScopeHub("org/gated").fetch(ID, "k.pt", limit=1 << 20) == ROTATION


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
        with pytest.raises(errors.LoginRequired):
            hub.commit(addition(hub.revision))
        assert not posts(first) and not posts(second)
        with pytest.raises(errors.RepositoryNotFound):
            ModelScopeHub("org/none").artifacts()
        second.clear()
        first.fault("status", LISTING, code=503)
        with pytest.raises(errors.HubUnreachable):
            open_zoo().artifacts()
        first.fault("status", LISTING, code=403)
        with pytest.raises(errors.Forbidden):
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
def test_the_client_s_address(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    hub_config = pytest.importorskip("modelscope_hub").HubConfig
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ModelScopeHub("org/zoo").key.split()[1] == hub_config(token="").endpoint


PUBLISH = """
import json, sys
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.hubs.base import Change
from oscar_zoo.registry.hubs.modelscope import ModelScopeHub
hub, artifact = ModelScopeHub("org/zoo"), ArtifactId("Tiny", "seq8_prompt1_group8")
hub.create()
hub.create()
files = {"k.pt": bytes(range(256)) * 40, "v.pt": b"", "stats.bin": bytes(70_000), "oscar.json": b"{}"}
root = {"index.json": b"i" * 70_000, "README.md": b"c" * 70_000}
made = hub.commit(Change(artifact, files, root, hub.revision, "Publish Tiny"))
hub.tag("oz-tiny", made.revision, "Tiny")
hub.tag("oz-tiny", made.revision, "Tiny")
hub.refresh()
same = all(hub.fetch(artifact, name, limit=1 << 20) == data for name, data in files.items())
same = same and all(hub.root_file(name) == data for name, data in root.items())
print(json.dumps([made.revision, hub.revision, same]))
"""  # noqa: E501


class Bomb:
    """What the client would load as a saved login."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_an_artifact_is_published_in_one_commit_silently_and_without_the_saved_login(
    server: HubServer, tmp_path: Path
) -> None:
    pytest.importorskip("modelscope_hub")
    environment = server.environment(tmp_path) | {"OSCAR_ZOO_CACHE": str(tmp_path / "cache")}
    saved = Path(environment["HOME"]) / ".modelscope" / "credentials" / "cookies"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(pickle.dumps(Bomb(tmp_path / "loaded")))
    saved.chmod(0o644)

    def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        child = [sys.executable, "-W", "error::FutureWarning", "-c", code]
        given = environment | variables
        return subprocess.run(child, env=given, capture_output=True, text=True, timeout=300)

    done = run(PUBLISH, MODELSCOPE_API_TOKEN=CANARY, MODELSCOPE_LOG_LEVEL="DEBUG")
    assert (done.returncode, done.stderr) == (0, "")
    repo = server.find("ms", "org/zoo")
    assert repo is not None
    first, made = repo.commits
    assert json.loads(done.stdout) == [made.oid, made.oid, True]
    assert (made.parent, made.message) == (first.oid, "Publish Tiny")
    assert repo.tags == {"oz-tiny": made.oid}
    large = {path.rpartition("/")[2] for path, blob in made.blobs.items() if blob.lfs}
    assert large == {"index.json", "k.pt", "stats.bin", "v.pt"}
    assert not (tmp_path / "loaded").exists()
    assert list(saved.parent.iterdir()) == [saved] and saved.stat().st_mode & 0o777 == 0o644
    assert not list(Path(environment["HOME"]).rglob("session"))
    run("from modelscope_hub import HubApi; HubApi()")
    assert (tmp_path / "loaded").exists()  # the bomb was live


@pytest.fixture
def writing(repo: Repository, token: str) -> Repository:
    pytest.importorskip("modelscope_hub")
    return repo


def test_no_branch_that_moved_or_has_it_is_written(server: HubServer, writing: Repository) -> None:
    hub = open_zoo()
    parent = hub.revision
    writing.commit({"index.json": b"other"})
    with pytest.raises(errors.StaleRevision):
        hub.commit(addition(parent))
    taken = addition(None, artifact=ID, files={"oscar.json": b"{}"})
    with pytest.raises(errors.StaleRevision):
        hub.commit(taken)
    assert not posts(server)
    hub.refresh()
    hub.commit(addition(hub.revision))
    assert writing.files()["index.json"] == b'{"serial":2}'


@pytest.mark.parametrize(
    ("later", "error"),
    [
        ({"index.json": b"theirs"}, errors.NetworkError),
        ({"index.json": None}, errors.NetworkError),
        ({f"{OTHER}/k.pt": None}, errors.NetworkError),
        ({f"{OTHER}/k.pt": b"theirs"}, errors.DigestMismatchError),
        ({"theirs.md": b"beside"}, None),
    ],
)
def test_what_the_hub_has_afterwards_is_compared_with_what_was_sent(
    server: HubServer,
    writing: Repository,
    later: dict[str, bytes | None],
    error: type[errors.OscarZooError] | None,
) -> None:
    hub = open_zoo()
    parent = hub.revision

    def follow() -> None:
        server.fault("move", LISTING, times=1, call=lambda: writing.commit(later))

    server.fault("move", COMMIT, call=follow)
    if error is None:
        assert hub.commit(addition(parent)).revision == writing.commits[1].oid
    else:
        with pytest.raises(error):
            hub.commit(addition(parent))
    assert len(writing.commits) == 3


@pytest.mark.parametrize(
    ("path", "fault", "error"),
    [
        (COMMIT, {"code": 401}, errors.LoginRequired),
        (COMMIT, {"code": 403}, errors.Forbidden),
        (COMMIT, {"code": 400, "error_code": 10010103009}, errors.LoginRequired),
        (COMMIT, {"code": 409}, errors.ConflictError),
        (COMMIT, {"code": 400, "error_code": 10030000001}, errors.StaleRevision),
        (COMMIT, {"code": 400}, errors.HubUnreachable),
        (COMMIT, {"code": 200}, errors.HubUnreachable),
        (COMMIT, {"code": 200, "body": "<html>"}, errors.HubUnreachable),
        (COMMIT, {"code": 429, "retry_after": 7}, errors.RateLimited),
        (COMMIT, {"code": 502, "body": "<html>"}, errors.HubUnreachable),
        ("*/objects/batch", {"code": 403}, errors.Forbidden),
        ("*/objects/batch", {"code": 200, "body": "[]"}, errors.HubUnreachable),
        (
            "*/objects/batch",
            {"code": 200, "body": '{"Data":{"objects":[{"oid":1,"actions":null}]}}'},
            errors.HubUnreachable,
        ),
        ("/lfs/*", {"code": 403}, errors.Forbidden),
        ("/lfs/*", {"code": 500}, errors.HubUnreachable),
    ],
)
def test_a_refused_commit_is_an_error_of_ours_and_writes_nothing(
    server: HubServer,
    writing: Repository,
    path: str,
    fault: dict[str, Any],
    error: type[errors.OscarZooError],
) -> None:
    server.fault("status", path, **fault)
    with pytest.raises(errors.OscarZooError) as caught:
        open_zoo().commit(addition(None))
    assert isinstance(caught.value, error)
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None
    assert "injected" not in str(caught.value)
    assert len(writing.commits) == 1


def test_a_hub_that_falls_silent_is_given_up(
    server: HubServer, writing: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelscope, "_ANSWER_SECONDS", 0.3)
    server.fault("black_hole", "*/objects/batch")
    with pytest.raises(errors.HubTimeout):
        open_zoo().commit(addition(None))
    assert not [path for path in posts(server) if "/commit/" in path]


def test_a_tag_is_never_moved(server: HubServer, writing: Repository) -> None:
    hub, first = open_zoo(), writing.head()
    hub.tag("oz-a", first, "A")
    writing.commit({"index.json": b"new"})
    hub.tag("oz-a", first, "A")
    with pytest.raises(errors.ConflictError):
        hub.tag("oz-a", writing.head(), "A")
    writing.commit({"index.json": FILES["index.json"]})  # the files of the first commit again
    with pytest.raises(errors.ConflictError):
        hub.tag("oz-a", writing.head(), "A")
    hub.tag("oz-b", None, "B")
    assert writing.tags == {"oz-a": first, "oz-b": writing.head()}
    server.fault("status", "*/tag*", method="POST", code=403)
    with pytest.raises(errors.Forbidden):
        hub.tag("oz-c", first, "C")
    server.fault("status", "*/tag", code=200)
    with pytest.raises(errors.RevisionNotFound):
        hub.tag("oz-d", first, "D")


def test_nothing_is_sent_without_a_token_or_for_a_proposal(
    server: HubServer, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = open_zoo()
    for write in (lambda: hub.commit(addition(None)), lambda: hub.tag("oz-a", None, "A")):
        with pytest.raises(errors.LoginRequired, match="with a token only"):
            write()
    with pytest.raises(errors.UsageError):
        hub.commit(addition(None, propose=True))
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", CANARY)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://hub.example")
    with pytest.raises(errors.UsageError, match="without encryption"):
        ModelScopeHub("org/zoo").create()
    assert not posts(server)


def test_files_go_to_another_host_without_the_token(server: HubServer, writing: Repository) -> None:
    server.lfs_redirect = "cdn"
    hub = open_zoo()
    hub.commit(addition(hub.revision))
    sent = [record for record in server.requests if record.method == "PUT"]
    assert [(record.host, record.credentials) for record in sent] == [("cdn", False)]


@pytest.mark.parametrize("to", ["same", "port", "cdn"])
@pytest.mark.parametrize("code", [302, 307, 308])
@pytest.mark.parametrize("path", [COMMIT, "*/objects/batch", "/lfs/*"])
def test_writing_follows_no_redirect(
    server: HubServer, writing: Repository, path: str, to: str, code: int
) -> None:
    server.fault("redirect", path, to=to, code=code)
    with pytest.raises(errors.NetworkError):
        open_zoo().commit(addition(None))
    assert len(writing.commits) == 1
    places = {(record.host, "redirected" in record.path) for record in server.requests}
    assert places == {("origin", False)}
