"""Publishing over loopback HTTP with the real clients: what arrives, how often, and what a bad
network makes of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_repositories import Kind, Repository
from hub_server import HubServer
from hub_uses import HARD, VERSIONS, pull
from measured_artifacts import key_file, public_file
from publishing_child import Publisher
from tiny_artifacts import artifact_files, payload, write_folder

from oscar_zoo.artifact.manifest import SIGNATURE_NAME
from oscar_zoo.errors import ArtifactSignatureError
from oscar_zoo.registry.hubs.address import open_hub
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.params import Signed
from oscar_zoo.registry.signatures import SigningKey, sign
from oscar_zoo.registry.store import Store

HUB = "hf:org/zoo"
TAG = f"oz-{HARD.model}-{HARD.tag}"
TOKENS = {"HF_TOKEN": "hf_test", "MODELSCOPE_API_TOKEN": "ms-test"}


@pytest.fixture(scope="module")
def started() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def server(started: HubServer) -> Iterator[HubServer]:
    """The server of this module, emptied."""
    started.repositories.clear()
    started.clear()
    yield started
    started.clear_faults()


@pytest.fixture(scope="module", params=VERSIONS)
def child(
    request: pytest.FixtureRequest, started: HubServer, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp("publisher")
    child = Publisher(started.environment(folder) | TOKENS, folder, request.param)
    assert child.client.startswith(f"{request.param}.")
    yield child
    child.close()


@pytest.fixture
def publisher(child: Publisher) -> Publisher:
    """The child of this module without what it fetched: the same files have the same commit in
    every test."""
    child.forget()
    return child


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_folder(tmp_path / "out", artifact_files()))


def index_of(repo: Repository) -> Index:
    return Index.from_bytes(repo.files()["index.json"])


def commit_requests(server: HubServer) -> list[int | None]:
    return [r.status for r in server.requests if r.method == "POST" and "/commit/" in r.path]


def test_a_publish_is_one_commit_with_everything_and_a_tag_on_it(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    theirs = {"README.md": b"# Ours\n", "Other/tag/k.pt": b"theirs"}
    repo = server.repository("org/zoo", files=theirs)
    before = repo.head()
    done = publisher.do("publish", folder=folder, hub=HUB)
    assert (done["already_published"], done["tag"], done["warnings"]) == (False, TAG, [])
    assert [c.oid for c in repo.commits] == [before, done["revision"]]
    assert repo.tags == {TAG: done["revision"]} and commit_requests(server) == [200]
    files = repo.files()
    own = {path: data for path, data in files.items() if path.startswith(f"{HARD}/")}
    assert own == {f"{HARD}/{name}": data for name, data in artifact_files().items()}
    entry = index_of(repo).entry(HARD)
    assert entry is not None and entry.digest == done["digest"]
    assert files["README.md"].startswith(b"# Ours\n") and HARD.tag.encode() in files["README.md"]
    assert files["Other/tag/k.pt"] == b"theirs"


@pytest.mark.parametrize("scheme", ["hf", "ms"])
def test_a_signature_goes_along_and_is_required_of_a_pull(
    server: HubServer,
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: Kind,
) -> None:
    pytest.importorskip("cryptography")
    private, files = key_file(tmp_path / "zoo.pem"), artifact_files()
    signature = sign(str(HARD), files, SigningKey.of_file(private))
    signed = str(write_folder(tmp_path / "signed", {**files, SIGNATURE_NAME: signature}))
    repo, hub = server.repository("org/signed", scheme), f"{scheme}:org/signed"
    for again in (False, True):
        done = publisher.do("publish", folder=signed, hub=hub)
        assert (done["already_published"], done["warnings"]) == (again, [])
    assert repo.files()[f"{HARD}/{SIGNATURE_NAME}"] == signature
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, value in server.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    wish = Signed(require_signature=True, keys=(public_file(private),))
    got = pull(HARD.reference, open_hub(hub), Store(tmp_path / "store"), signing=wish)
    assert got.signature.state == "valid" and got.artifact.signature == signature
    wish = Signed(require_signature=True, keys=(public_file(key_file(tmp_path / "other.pem")),))
    with pytest.raises(ArtifactSignatureError, match="not known here") as caught:
        pull(HARD.reference, open_hub(hub), Store(tmp_path / "second"), signing=wish)
    assert caught.value.code == "signature.unknown_key"


def test_a_commit_of_others_is_kept(server: HubServer, publisher: Publisher, folder: str) -> None:
    repo = server.repository("org/zoo")
    server.fault(
        "move",
        "*/commit/*",
        times=1,
        call=lambda: repo.commit({"notes.txt": b"mine", "README.md": b"# New\n"}),
    )
    done = publisher.do("publish", folder=folder, hub=HUB)
    assert (done["already_published"], done["revision"]) == (False, repo.head())
    assert commit_requests(server) == [412, 200]
    assert repo.files()["notes.txt"] == b"mine" and repo.files()["README.md"].startswith(b"# New\n")
    assert len(repo.commits) == 3


def test_a_proposal_becomes_a_version_when_it_is_merged(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    repo = server.repository("org/zoo", files={"README.md": b"# Theirs\n"})
    done = publisher.do("publish", folder=folder, hub=HUB, propose=True)
    assert (done["proposal"], done["tag"]) == (f"{server.url}/org/zoo/discussions/1", None)
    assert (len(repo.pulls), len(repo.commits), repo.tags) == (1, 1, {})
    repo.merge(1)
    merged = publisher.do("publish", folder=folder, hub=HUB)
    assert (merged["already_published"], merged["tag"], len(repo.commits)) == (True, TAG, 2)


def test_writing_needs_the_right_to(server: HubServer, publisher: Publisher, folder: str) -> None:
    repo = server.repository("org/zoo")
    repo.write_token = "hf_owner"
    assert publisher.do("publish", folder=folder, hub=HUB)["error"].startswith("access")
    assert (len(repo.commits), repo.tags) == (1, {})


def test_a_mirror_on_the_other_hub_has_the_same_digests(
    server: HubServer, publisher: Publisher, folder: str, tmp_path: Path
) -> None:
    def mirror(source: str, target: str, *names: str, **options: bool) -> Any:
        return publisher.do("mirror", source=source, target=target, names=names, **options)

    def versions(repo: Repository, of: str = "") -> dict[str, bytes]:
        files = repo.files().items()
        return {path: data for path, data in files if path.count("/") == 2 and path.startswith(of)}

    files = artifact_files(artifact="tiny-qwen3-hard/other", seed=1)
    other = str(write_folder(tmp_path / "other", files))
    bare = {f"Bare/tag/{name}": data for name, data in payload(seed=2).items()}
    repo = server.repository("org/zoo", files=bare)
    for source in (folder, other):
        publisher.do("publish", folder=source, hub=HUB)
    names = {"Bare/tag", "tiny-qwen3-hard/other", str(HARD)}
    done = mirror(HUB, "ms:org/copy", create=True)
    assert done == dict.fromkeys(names, "copied")
    copy = server.repository("org/copy", "ms")
    assert versions(repo) == versions(copy) and len(versions(copy)) == 8
    assert set(copy.tags) == {"oz-Bare-tag", "oz-tiny-qwen3-hard-other", TAG}
    place = [entry.hubs["hf"] for entry in index_of(copy).artifacts]
    assert {(p.repo, p.revision) for p in place} == {("org/zoo", repo.head())}
    commits = len(copy.commits)
    assert mirror(HUB, "ms:org/copy") == dict.fromkeys(names, "already there")
    assert len(copy.commits) == commits
    assert mirror("ms:org/copy", "hf:org/back", "Bare", create=True) == {"Bare/tag": "copied"}
    assert versions(server.repository("org/back"), "Bare/") == versions(repo, "Bare/")


def test_modelscope_takes_a_version_once_even_when_the_reply_is_lost(
    server: HubServer, publisher: Publisher, folder: str, tmp_path: Path
) -> None:
    repo = server.repository("org/zoo", "ms")
    server.fault("lose_reply", "*/commit/*", times=1, method="POST")
    done = publisher.do("publish", folder=folder, hub="ms:org/zoo")
    assert (done["tag"], list(repo.tags)) == (TAG, [TAG])
    commits = len(repo.commits)
    assert publisher.do("publish", folder=folder, hub="ms:org/zoo")["already_published"]
    rival = str(write_folder(tmp_path / "rival", artifact_files(seed=1)))
    assert publisher.do("publish", folder=rival, hub="ms:org/zoo")["error"] == "conflict.version"
    other = str(write_folder(tmp_path / "other", artifact_files(artifact="tiny-qwen3-hard/other")))
    assert publisher.do("publish", folder=other, hub="ms:org/zoo", propose=True)["error"] == "usage"
    assert len(repo.commits) == commits
