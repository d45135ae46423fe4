"""ModelScope written in one commit, through its real client, against a hub that lies, refuses or
falls silent."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_repositories import Repository
from hub_server import HubServer
from modelscope_zoo import (
    CANARY,
    COMMIT,
    FILES,
    ID,
    LISTING,
    OTHER,
    addition,
    isolate,
    open_zoo,
    posts,
)

from oscar_zoo.errors import (
    ConflictError,
    DigestMismatchError,
    Forbidden,
    HubTimeout,
    HubUnreachable,
    LoginRequired,
    NetworkError,
    OscarZooError,
    RateLimited,
    RevisionNotFound,
    StaleRevision,
    UsageError,
)
from oscar_zoo.registry.hubs import modelscope_wire
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


PUBLISH = """
import json, sys
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.hubs.base import Change
from oscar_zoo.registry.hubs.modelscope import open_modelscope
hub, artifact = open_modelscope("org/zoo"), ArtifactId("Tiny", "seq8_prompt1_group8")
hub.create(private=False)
hub.create(private=False)
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
        return subprocess.run(
            child, env=environment | variables, capture_output=True, text=True, timeout=300
        )

    done = run(PUBLISH, MODELSCOPE_API_TOKEN=CANARY, MODELSCOPE_LOG_LEVEL="DEBUG")
    assert (done.returncode, done.stderr) == (0, "")
    repo = server.find("ms", "org/zoo")
    assert repo is not None
    first, made = repo.commits
    assert json.loads(done.stdout) == [made.oid, made.oid, True]
    assert (made.parent, made.message, repo.tags) == (
        first.oid,
        "Publish Tiny",
        {"oz-tiny": made.oid},
    )
    assert {path.rpartition("/")[2]: blob.lfs for path, blob in made.blobs.items()} == {
        ".gitattributes": False,
        "README.md": False,
        "index.json": True,
        "k.pt": True,
        "oscar.json": False,
        "stats.bin": True,
        "v.pt": True,
    }
    assert not (tmp_path / "loaded").exists()
    assert list(saved.parent.iterdir()) == [saved] and saved.stat().st_mode & 0o777 == 0o644
    assert not list(Path(environment["HOME"]).rglob("session"))
    run("from modelscope_hub import HubApi; HubApi()")
    assert (tmp_path / "loaded").exists()  # the bomb was live


@pytest.fixture
def writing(repo: Repository, token: str) -> Repository:
    pytest.importorskip("modelscope_hub")
    return repo


def test_a_branch_that_moved_or_has_the_version_is_not_written(
    server: HubServer, writing: Repository
) -> None:
    hub = open_zoo()
    parent = hub.revision
    writing.commit({"index.json": b"other"})
    with pytest.raises(StaleRevision):
        hub.commit(addition(parent))
    taken = addition(None, artifact=ID, files={"oscar.json": b"{}"})
    with pytest.raises(StaleRevision):
        hub.commit(taken)
    assert not posts(server)
    hub.refresh()
    hub.commit(addition(hub.revision))
    assert writing.files()["index.json"] == b'{"serial":2}'


@pytest.mark.parametrize(
    ("later", "error"),
    [
        ({"index.json": b"theirs"}, NetworkError),
        ({"index.json": None}, NetworkError),
        ({f"{OTHER}/k.pt": None}, NetworkError),
        ({f"{OTHER}/k.pt": b"theirs"}, DigestMismatchError),
        ({"theirs.md": b"beside"}, None),
    ],
)
def test_what_the_hub_has_afterwards_is_compared_with_what_was_sent(
    server: HubServer,
    writing: Repository,
    later: dict[str, bytes | None],
    error: type[OscarZooError] | None,
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
        (COMMIT, {"code": 401}, LoginRequired),
        (COMMIT, {"code": 403}, Forbidden),
        (COMMIT, {"code": 400, "error_code": 10010103009}, LoginRequired),
        (COMMIT, {"code": 409}, ConflictError),
        (COMMIT, {"code": 400, "error_code": 10030000001}, StaleRevision),
        (COMMIT, {"code": 400}, HubUnreachable),
        (COMMIT, {"code": 200}, HubUnreachable),
        (COMMIT, {"code": 200, "body": "<html>"}, HubUnreachable),
        (COMMIT, {"code": 429, "retry_after": 7}, RateLimited),
        (COMMIT, {"code": 502, "body": "<html>"}, HubUnreachable),
        ("*/objects/batch", {"code": 403}, Forbidden),
        ("*/objects/batch", {"code": 200, "body": "[]"}, HubUnreachable),
        (
            "*/objects/batch",
            {"code": 200, "body": '{"Data":{"objects":[{"oid":1,"actions":null}]}}'},
            HubUnreachable,
        ),
        ("/lfs/*", {"code": 403}, Forbidden),
        ("/lfs/*", {"code": 500}, HubUnreachable),
    ],
)
def test_a_refused_commit_is_an_error_of_ours_and_writes_nothing(
    server: HubServer,
    writing: Repository,
    path: str,
    fault: dict[str, Any],
    error: type[OscarZooError],
) -> None:
    server.fault("status", path, **fault)
    with pytest.raises(OscarZooError) as caught:
        open_zoo().commit(addition(None))
    assert isinstance(caught.value, error)
    assert (
        CANARY not in "".join(traceback.format_exception(caught.value))
        and caught.value.__context__ is None
    )
    assert "injected" not in str(caught.value)
    assert len(writing.commits) == 1


def test_a_hub_that_falls_silent_is_given_up(
    server: HubServer, writing: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelscope_wire, "_ANSWER_SECONDS", 0.3)
    server.fault("black_hole", "*/objects/batch")
    with pytest.raises(HubTimeout):
        open_zoo().commit(addition(None))
    assert not [path for path in posts(server) if "/commit/" in path]


def test_a_tag_is_never_moved(server: HubServer, writing: Repository) -> None:
    hub, first = open_zoo(), writing.head()
    hub.tag("oz-a", first, "A")
    writing.commit({"index.json": b"new"})
    hub.tag("oz-a", first, "A")
    with pytest.raises(ConflictError):
        hub.tag("oz-a", writing.head(), "A")
    writing.commit({"index.json": FILES["index.json"]})  # the files of the first commit again
    with pytest.raises(ConflictError):
        hub.tag("oz-a", writing.head(), "A")
    hub.tag("oz-b", None, "B")
    assert writing.tags == {"oz-a": first, "oz-b": writing.head()}
    server.fault("status", "*/tag*", method="POST", code=403)
    with pytest.raises(Forbidden):
        hub.tag("oz-c", first, "C")
    server.fault("status", "*/tag", code=200)
    with pytest.raises(RevisionNotFound):
        hub.tag("oz-d", first, "D")


def test_nothing_is_sent_without_a_token_or_for_a_proposal(
    server: HubServer, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = open_zoo()
    for write in (lambda: hub.commit(addition(None)), lambda: hub.tag("oz-a", None, "A")):
        with pytest.raises(LoginRequired, match="with a token only"):
            write()
    with pytest.raises(UsageError):
        hub.commit(addition(None, propose=True))
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", CANARY)
    with pytest.raises(UsageError, match="without encryption"):
        open_modelscope("org/zoo", endpoint="http://hub.example").create(private=True)
    assert not posts(server)


def test_files_go_to_another_host_without_the_token(server: HubServer, writing: Repository) -> None:
    server.lfs_redirect = "cdn"
    hub = open_zoo()
    hub.commit(addition(hub.revision))
    sent = [
        (record.host, record.credentials) for record in server.requests if record.method == "PUT"
    ]
    assert sent == [("cdn", False)]


@pytest.mark.parametrize("to", ["same", "port", "cdn"])
@pytest.mark.parametrize("code", [302, 307, 308])
@pytest.mark.parametrize("path", [COMMIT, "*/objects/batch", "/lfs/*"])
def test_writing_follows_no_redirect(
    server: HubServer, writing: Repository, path: str, to: str, code: int
) -> None:
    server.fault("redirect", path, to=to, code=code)
    with pytest.raises(NetworkError):
        open_zoo().commit(addition(None))
    assert len(writing.commits) == 1
    assert not [
        record for record in server.requests if "redirected" in record.path or record.host == "cdn"
    ]
