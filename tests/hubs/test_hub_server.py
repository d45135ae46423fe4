"""The loopback hub is taken for a hub by the real clients; two versions of one, and the other."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hub_clients import VERSIONS, run_client
from hub_server import HubServer
from hub_tls import OPENSSL

LARGE = bytes(range(256)) * 4000
FILES = {"m/t/k.pt": LARGE, "m/t/oscar.json": b"{}", "README.md": b"# card\n"}
NO_MODELSCOPE = importlib.util.find_spec("modelscope_hub") is None


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def gets(server: HubServer) -> list[str]:
    """Paths of the content that was sent."""
    return [
        record.path
        for record in server.requests
        if record.method == "GET" and "/resolve/" in record.path
    ]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


PUBLISH = """
import io, json, logging
from huggingface_hub import CommitOperationAdd as Add, HfApi, __version__
from huggingface_hub.errors import HfHubHTTPError
def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except HfHubHTTPError as error:
        return error.response.status_code
api = HfApi(token="hf_test")
logging.disable()
api.create_repo("org/name")
api.create_repo("org/name", exist_ok=True)
head = api.model_info("org/name").sha
files = [
    Add("m/t/k.pt", io.BytesIO(bytes(range(256)) * 4000)), Add("m/t/oscar.json", b"{}"), Add("README.md", b"# card\\n"),
]
made = api.create_commit("org/name", files, commit_message="publish", parent_commit=head)
stale = refused(api.create_commit, "org/name", [Add("x", b"1")], commit_message="late", parent_commit=head)
offer = api.create_commit("org/name", [Add("x", b"1")], commit_message="offer", parent_commit=head, create_pr=True)
api.create_tag("org/name", tag="oz-m-t", revision=made.oid)
again = refused(api.create_tag, "org/name", tag="oz-m-t", revision=head)
info = api.model_info("org/name", revision="oz-m-t", files_metadata=True)
tree = list(api.list_repo_tree("org/name", revision=made.oid, recursive=True))
print(json.dumps({
    "version": __version__, "who": api.whoami()["name"], "head": head, "made": made.oid, "stale": stale,
    "offer": [offer.oid, offer.pr_url], "again": again, "tagged": info.sha,
    "siblings": {s.rfilename: [s.size, s.blob_id, s.lfs and s.lfs.sha256] for s in info.siblings},
    "tree": {f.path: [f.size, f.blob_id, f.lfs and f.lfs.sha256] for f in tree if hasattr(f, "size")},
    "folders": [f.path for f in tree if not hasattr(f, "size")],
    "some": [f.path for f in api.get_paths_info("org/name", ["m/t/k.pt", "none"], revision="main")],
    "refs": [ref.name for ref in api.list_repo_refs("org/name", include_pull_requests=True).pull_requests],
    "log": [commit.title for commit in api.list_repo_commits("org/name")],
}))
"""  # noqa: E501


@pytest.mark.parametrize("version", VERSIONS)
def test_huggingface_hub_publishes(server: HubServer, tmp_path: Path, version: int) -> None:
    server.paged = 2
    told = run_client(
        PUBLISH, server.environment(tmp_path), version=version, HF_HUB_DISABLE_XET="1"
    )
    repo = server.repository("org/name")
    assert version == 1 or told["version"].startswith("2.")
    assert repo.files() == FILES | {".gitattributes": repo.files()[".gitattributes"]}
    assert (told["who"], told["made"], told["tagged"]) == ("tester", repo.head(), repo.head())
    assert repo.tags == {"oz-m-t": repo.head()}
    assert (told["stale"], told["again"]) == (412, 409)
    assert [
        (pull.commit.oid, pull.commit.parent, pull.commit.files["x"]) for pull in repo.pulls
    ] == [(told["offer"][0], told["head"], b"1")]
    assert told["offer"][1] == f"{server.url}/org/name/discussions/1"
    assert told["tree"] == told["siblings"]
    assert told["tree"]["m/t/k.pt"][::2] == [len(LARGE), sha256(LARGE)]
    assert told["tree"]["m/t/oscar.json"] == [2, "9e26dfeeb6e641a33dae4961196235bdb965b21b", None]
    assert told["folders"] == ["m", "m/t"]
    assert (told["some"], told["refs"]) == (["m/t/k.pt"], ["refs/pr/1"])
    assert told["log"] == ["publish", "initial commit"]
    uploads = [record for record in server.requests if record.method == "PUT"]
    assert [(record.host, record.credentials) for record in uploads] == [("cdn", False)]


DOWNLOAD = """
import hashlib, json, pathlib
from huggingface_hub import hf_hub_download, snapshot_download
def read(folder):
    folder = pathlib.Path(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
cold = snapshot_download("org/name", revision="v1", token="hf_test")
warm = snapshot_download("org/name", revision=pathlib.Path(cold).name)
one = hf_hub_download("org/name", "m/t/k.pt", revision="main", cache_dir="other", token="hf_test")
print(json.dumps({
    "commit": pathlib.Path(cold).name, "same": cold == warm, "files": read(cold), "one": read(pathlib.Path(one).parent),
}))
"""  # noqa: E501


@pytest.mark.parametrize("redirect", [None, "cdn", "same"])
@pytest.mark.parametrize("version", VERSIONS)
def test_huggingface_hub_downloads(
    server: HubServer, tmp_path: Path, version: int, redirect: Any
) -> None:
    server.lfs_redirect = redirect
    repo = server.repository("org/name", files=FILES)
    repo.move("v1", repo.head())
    told = run_client(DOWNLOAD, server.environment(tmp_path), version=version)
    hashes = {path: sha256(data) for path, data in FILES.items()}
    assert told == {
        "commit": repo.head(),
        "same": True,
        "files": hashes,
        "one": {"k.pt": hashes["m/t/k.pt"]},
    }
    assert not any(record.credentials for record in server.requests if record.host == "cdn")
    assert any(record.host == "cdn" for record in server.requests) == (redirect == "cdn")
    asked = [record.path for record in server.requests if record.path.startswith("/api/")]
    assert [path.split("/")[5] for path in asked] == [
        "revision",
        "tree",
    ], "the warm download asked nothing"


TOKEN = """
import hashlib, json, pathlib
from huggingface_hub import hf_hub_download
path = hf_hub_download("org/name", "m/t/k.pt", token="hf_test")
print(json.dumps(hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()))
"""


@pytest.mark.skipif(OPENSSL is None, reason="no openssl to make a certificate with")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_token_does_not_go_from_https_to_another_name(tmp_path: Path, version: int) -> None:
    with HubServer(tls=True) as server:
        assert server.url.startswith("https://")
        server.repository("org/name", files=FILES)
        server.lfs_redirect = "cdn"
        assert run_client(TOKEN, server.environment(tmp_path), version=version) == sha256(LARGE)
        assert {(record.host, record.credentials) for record in server.requests} == {
            ("origin", True),
            ("cdn", False),
        }


REFUSALS = """
import json
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
def told(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
        return "ok"
    except HfHubHTTPError as error:
        return f"{type(error).__name__} {error.response.status_code}"
def info(repo, token=False, revision=None):
    return told(HfApi().model_info, repo, token=token, revision=revision)
def load(repo, token=False, path="a"):
    try:
        return told(hf_hub_download, repo, path, token=token)
    except OSError as error:
        return f"{type(error.__cause__).__name__} {error.__cause__.response.status_code}"
print(json.dumps({
    "missing": [info("org/none"), info("org/none", "hf_test")],
    "revision": info("org/open", revision="none"), "old": info("org/open", revision="OLD"),
    "file": load("org/open", path="b"),
    "open": [info("org/open"), info("org/open", "hf_any")],
    "private": [info("org/private"), info("org/private", "hf_wrong"), info("org/private", "hf_right")],
    "gated": [info("org/gated"), load("org/gated"), load("org/gated", "hf_wrong"), load("org/gated", "hf_right")],
    "write": [told(HfApi(token=t).create_tag, "org/open", tag="t") for t in (False, "hf_wrong", "hf_write")],
}))
"""  # noqa: E501


@pytest.mark.parametrize("version", VERSIONS)
def test_huggingface_hub_understands_refusals(
    server: HubServer, tmp_path: Path, version: int
) -> None:
    repo = server.repository("org/open", files={"a": b"1"})
    repo.write_token, old = "hf_write", repo.head()
    assert repo.rewrite_history() != old
    server.repository("org/private", token="hf_right", files={"a": b"1"})
    server.repository("org/gated", gated=True, token="hf_right", files={"a": b"1"})
    told = run_client(REFUSALS.replace("OLD", old), server.environment(tmp_path), version=version)
    no_repo, no_revision, gated, other = (
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
        "GatedRepoError",
        "HfHubHTTPError",
    )
    assert told == {
        "missing": [f"{no_repo} 401", f"{no_repo} 404"],
        "revision": f"{no_revision} 404",
        "old": f"{no_revision} 404",
        "file": "RemoteEntryNotFoundError 404",
        "open": ["ok", "ok"],
        "private": [f"{no_repo} 401", f"{other} 401", "ok"],
        "gated": ["ok", f"{gated} 401", f"{gated} 403", "ok"],
        "write": [f"{other} 401", f"{other} 403", "ok"],
    }


FAULTS = """
import hashlib, json, pathlib
from huggingface_hub import CommitOperationAdd as Add, HfApi, hf_hub_download
def name(call, *args, **kwargs):
    try:
        return call(*args, **kwargs) and "ok"
    except Exception as error:
        return type(error).__name__
path = pathlib.Path(hf_hub_download("org/name", "m/t/k.pt"))
parts = hf_hub_download("org/name", "m/t/k.pt", cache_dir="other")
print(json.dumps({
    "flipped": hashlib.sha256(path.read_bytes()).hexdigest(),
    "cut": hashlib.sha256(pathlib.Path(parts).read_bytes()).hexdigest(),
    "hole": name(HfApi().model_info, "org/hole", timeout=0.5),
    "lost": name(HfApi(token="hf_test").create_commit, "org/name", [Add("x", b"1")], commit_message="lost"),
}))
"""  # noqa: E501


@pytest.mark.parametrize("version", VERSIONS)
def test_huggingface_hub_meets_faults(server: HubServer, tmp_path: Path, version: int) -> None:
    repo = server.repository("org/name", files=FILES)
    server.fault("black_hole", path="*/org/hole*")
    lost = server.fault("lose_reply", path="*/commit/main")
    server.fault("cut", path="*k.pt", times=1, after=100_000)
    server.fault("flip", path="*k.pt", times=1, at=-1)  # the latest: used up by the first download
    told = run_client(FAULTS, server.environment(tmp_path), version=version)
    assert told["flipped"] == sha256(LARGE[:-1] + bytes([LARGE[-1] ^ 0xFF])), (
        "this client checks no content"
    )
    assert told["cut"] == sha256(LARGE), "this client asks again"
    assert len(gets(server)) == 3
    assert told["hole"] in ("ReadTimeout", "ConnectTimeout")
    assert told["lost"] == "RemoteProtocolError"
    assert (lost.hits, repo.files()["x"]) == (1, b"1")


MODELSCOPE_CLIENT = """
import hashlib, json, logging, pathlib
from modelscope_hub import HubApi
from modelscope_hub.errors import HubError
logging.disable()
def name(call, *args, **kwargs):
    try:
        return call(*args, **kwargs) and "ok"
    except HubError as error:
        return type(error).__name__
def read(folder):
    folder = pathlib.Path(folder)
    files = [p for p in folder.rglob("*") if p.is_file() and ".lock" not in p.name]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
api = HubApi(token="ms_test")
api.create_repo("org/name", "model")
again = name(api.create_repo, "org/name", "model")
for path, data in {"m/t/k.pt": bytes(range(256)) * 4000, "m/t/oscar.json": b"{}", "README.md": b"# card\\n"}.items():
    target = pathlib.Path("up") / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
made = api.upload_folder("org/name", "model", "up", commit_message="publish", use_cache=False)
api.create_repo_tag("org/name", "model", "oz-m-t", revision="master")
print(json.dumps({
    "again": again, "made": made["oid"], "who": api.whoami().username,
    "tag": name(api.create_repo_tag, "org/name", "model", "oz-m-t", revision="master"),
    "list": {f.path: [f.size, f.sha256] for f in api.list_repo_files("org/name", "model", revision="oz-m-t") if f.size},
    "revisions": sorted(r["Revision"] for r in api.list_repo_revisions("org/name", "model")),
    "files": read(api.download_repo("org/name", "model", revision="oz-m-t")),
    "no_repo": name(api.list_repo_files, "org/none", "model"),
    "no_revision": name(api.list_repo_files, "org/name", "model", revision="x"),
    "stranger": name(HubApi(token="wrong").list_repo_files, "org/private", "model"),
}))
"""  # noqa: E501


@pytest.mark.skipif(NO_MODELSCOPE, reason="the extra modelscope is not installed")
@pytest.mark.parametrize("redirect", [None, "cdn"])
def test_modelscope_hub_publishes_and_downloads(
    server: HubServer, tmp_path: Path, redirect: Any
) -> None:
    server.lfs_redirect = redirect
    server.repository("org/private", "ms", token="ms_right", files={"a": b"1"})
    flip = server.fault("flip", path="*k.pt", times=1, method="GET", at=5)
    told = run_client(MODELSCOPE_CLIENT, server.environment(tmp_path))
    repo = server.repository("org/name", "ms")
    files = FILES | {".gitattributes": repo.files()[".gitattributes"]}
    assert repo.files() == files
    assert (told["who"], told["made"], repo.tags) == (
        "tester",
        repo.head(),
        {"oz-m-t": repo.head()},
    )
    assert (told["again"], told["tag"]) == ("AlreadyExistsError", "AlreadyExistsError")
    assert told["list"] == {path: [len(data), sha256(data)] for path, data in files.items()}
    assert told["revisions"] == ["master", "oz-m-t"]
    assert told["files"] == {path: sha256(data) for path, data in files.items()}, (
        "this client checks and asks again"
    )
    assert flip.hits == 1
    assert (told["no_repo"], told["no_revision"]) == ("NotExistError", "NotExistError")
    assert told["stranger"] == "AuthenticationError"
    assert any(record.host == "cdn" and record.method == "GET" for record in server.requests) == (
        redirect == "cdn"
    )


def test_one_of_many_commits_on_one_parent_wins(server: HubServer) -> None:
    repo = server.repository("org/name", files={"a": b"1"})
    parent = repo.head()

    def commit(number: int) -> int:
        lines = [
            {"key": "header", "value": {"summary": str(number), "parentCommit": parent}},
            {"key": "file", "value": {"path": "winner", "content": "MQ==", "encoding": "base64"}},
        ]
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
        body = "\n".join(json.dumps(line) for line in lines)
        connection.request(
            "POST", "/api/models/org/name/commit/main", body, {"Authorization": "Bearer hf_test"}
        )
        return connection.getresponse().status

    with ThreadPoolExecutor(8) as pool:
        answers = sorted(pool.map(commit, range(16)))
    assert answers == [200] + [412] * 15
    assert len(repo.commits) == 2


def test_a_merged_proposal_keeps_what_came_between(server: HubServer) -> None:
    repo = server.repository("org/name", files={"a": b"1", "b": b"1"})
    base = repo.at("main")
    pull = repo.propose({"a": None, "c": base.blobs["a"]}, message="offer", base=base.oid)
    repo.commit({"d": b"2"})
    assert repo.files(pull.branch) == {"b": b"1", "c": b"1"}
    repo.merge(pull.number)
    assert repo.files() == {"b": b"1", "c": b"1", "d": b"2"}


def test_it_serves_a_folder_as_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "k.pt").write_bytes(LARGE)
    program = Path(__file__).parents[1] / "support" / "hub_server.py"
    command = [sys.executable, str(program), "--seed", str(tmp_path), "--repo", "org/name"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            connection = http.client.HTTPConnection(
                urlsplit(child.stdout.readline().strip()).netloc, timeout=20
            )
            for path in (
                "/org/name/resolve/main/m/k.pt",
                "/api/v1/models/org/name/repo?Revision=master&FilePath=m/k.pt",
            ):
                connection.request("GET", path)
                assert connection.getresponse().read() == LARGE
        finally:
            child.kill()
