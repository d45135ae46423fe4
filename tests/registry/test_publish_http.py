"""Publishing over loopback HTTP with the real clients: what arrives, how often, and what a bad
network makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_repositories import Kind, Repository
from hub_server import HubServer
from hub_uses import HARD, VERSIONS, pull
from measured_artifacts import key_file, public_file
from publishing_child import Publisher
from tiny_artifacts import FILE_NAME, artifact_files, payload, write_folder

from oscar_zoo.artifact.manifest import SIGNATURE_NAME
from oscar_zoo.errors import ArtifactSignatureError
from oscar_zoo.registry.hubs.address import open_hub
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.signatures import SignatureWish, sign
from oscar_zoo.registry.signing_key import SigningKey
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
    repo = server.repository(
        "org/zoo", files={"README.md": b"# Ours\n", "Other/tag/k.pt": b"theirs"}
    )
    before = repo.head()
    done = publisher.do("publish", folder=folder, hub=HUB)
    assert (done["already_published"], done["tag"], done["warnings"]) == (False, TAG, [])
    assert [c.oid for c in repo.commits] == [before, done["revision"]] and repo.tags == {
        TAG: done["revision"]
    }
    assert commit_requests(server) == [200]
    files = repo.files()
    assert {path: data for path, data in files.items() if path.startswith(f"{HARD}/")} == {
        f"{HARD}/{name}": data for name, data in artifact_files().items()
    }
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
    wish = SignatureWish(True, (public_file(private),))
    got = pull(HARD.reference, open_hub(hub), Store(tmp_path / "store"), signing=wish)
    assert got.signature.state == "valid" and got.artifact.signature == signature
    wish = SignatureWish(True, (public_file(key_file(tmp_path / "other.pem")),))
    with pytest.raises(ArtifactSignatureError, match="not known here") as caught:
        pull(HARD.reference, open_hub(hub), Store(tmp_path / "second"), signing=wish)
    assert caught.value.code == "signature.unknown_key"


def test_publishing_again_sends_nothing(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    repo = server.repository("org/zoo")
    first = publisher.do("publish", folder=folder, hub=HUB)
    server.clear()
    again = publisher.do("publish", folder=folder, hub=HUB)
    assert again == first | {"already_published": True}
    assert (commit_requests(server), len(repo.commits)) == ([], 2)
    assert not [r for r in server.requests if r.method == "PUT"]


def test_other_content_is_refused_and_a_yank_changes_the_index_alone(
    server: HubServer, publisher: Publisher, folder: str, tmp_path: Path
) -> None:
    repo = server.repository("org/zoo")
    publisher.do("publish", folder=folder, hub=HUB)
    rival = str(write_folder(tmp_path / "rival", artifact_files(seed=1)))
    assert publisher.do("publish", folder=rival, hub=HUB)["error"] == "conflict.version"
    before, tags = repo.files(), dict(repo.tags)
    done = publisher.do("status", name=HARD.reference, hub=HUB, state="yanked", reason="wrong data")
    assert (done["changed"], done["serial"], done["revision"]) == (True, 2, repo.head())
    changed = {path for path, data in repo.files().items() if before.get(path) != data}
    assert (changed, repo.tags, len(repo.commits)) == ({"index.json", "README.md"}, tags, 3)
    assert not publisher.do(
        "status", name=HARD.reference, hub=HUB, state="yanked", reason="wrong data"
    )["changed"]
    entry = index_of(repo).entry(HARD)
    assert entry is not None and entry.status.state == "yanked"


def test_a_lost_reply_is_not_a_second_commit(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    repo = server.repository("org/zoo")
    server.fault("lose_reply", "*/commit/*", times=1, method="POST")
    done = publisher.do("publish", folder=folder, hub=HUB)
    assert (done["already_published"], done["tag"], done["revision"]) == (False, TAG, repo.head())
    assert len(repo.commits) == 2


def test_a_request_that_never_arrived_is_sent_again(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    repo = server.repository("org/zoo")
    server.fault("reset", "*/commit/*", times=1, method="POST")
    done = publisher.do("publish", folder=folder, hub=HUB)
    assert (done["already_published"], done["tag"], len(repo.commits)) == (False, TAG, 2)


def dies_with_the_next_commit(
    server: HubServer, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the next commit on, reading gives the page of a broken proxy."""
    commit = repo.commit_blobs

    def last(*arguments: Any, **more: Any) -> Any:
        server.fault("html", "*/api/models/*", method="GET")
        return commit(*arguments, **more)

    monkeypatch.setattr(repo, "commit_blobs", last)


@pytest.mark.parametrize("reply", ["lost", "read"])
def test_a_hub_that_dies_with_the_commit_leaves_it_unknown_until_the_next_run(
    server: HubServer,
    publisher: Publisher,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    reply: str,
) -> None:
    repo = server.repository("org/zoo")
    dies_with_the_next_commit(server, repo, monkeypatch)
    if reply == "lost":
        server.fault("lose_reply", "*/commit/*", times=1, method="POST")
    broken = publisher.do("publish", folder=folder, hub=HUB)
    assert broken["error"] == "network" and "run the same command again" in broken["hint"]
    assert ("not known" if reply == "lost" else "read back") in broken["message"]
    monkeypatch.undo()
    server.clear_faults()
    again = publisher.do("publish", folder=folder, hub=HUB)
    assert (again["already_published"], again["tag"], len(repo.commits)) == (True, TAG, 2)


def test_a_commit_of_somebody_else_in_between_is_kept(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    repo = server.repository("org/zoo")
    server.fault(
        "second_writer",
        times=1,
        call=lambda: repo.commit({"notes.txt": b"mine", "README.md": b"# New\n"}),
    )
    done = publisher.do("publish", folder=folder, hub=HUB)
    assert (done["already_published"], done["revision"]) == (False, repo.head())
    assert commit_requests(server) == [412, 200]
    assert repo.files()["notes.txt"] == b"mine" and repo.files()["README.md"].startswith(b"# New\n")
    assert len(repo.commits) == 3


def test_the_same_id_published_in_between_wins(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    repo = server.repository("org/zoo")
    rival = {f"{HARD}/{name}": data for name, data in artifact_files(seed=1).items()}
    server.fault("second_writer", times=1, call=lambda: repo.commit(rival))
    assert publisher.do("publish", folder=folder, hub=HUB)["error"] == "conflict.version"
    assert {path: data for path, data in repo.files().items() if path in rival} == rival
    assert (commit_requests(server), repo.tags) == ([412], {})


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


def test_a_proposal_whose_reply_is_lost_is_sent_once(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    repo = server.repository("org/zoo")
    server.fault("lose_reply", "*/commit/*", times=1, method="POST")
    assert "not known" in publisher.do("publish", folder=folder, hub=HUB, propose=True)["message"]
    assert len(repo.pulls) == 1


def test_a_repository_is_created_on_request_only(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    refused = publisher.do("publish", folder=folder, hub="hf:org/new")
    assert refused["error"] == "not_found.repository" and "--create" in refused["hint"]
    assert server.find("hf", "org/new") is None
    done = publisher.do("publish", folder=folder, hub="hf:org/new", create=True)
    assert done["tag"] == TAG
    assert set(server.repository("org/new").files()) > {
        f"{HARD}/{FILE_NAME}",
        "index.json",
        "README.md",
    }


@pytest.mark.parametrize("status", [403, 500])
def test_a_refused_tag_is_repaired_by_the_next_run(
    server: HubServer, publisher: Publisher, folder: str, status: int
) -> None:
    repo = server.repository("org/zoo")
    server.fault("refuse_tag", status=status)
    done = publisher.do("publish", folder=folder, hub=HUB)
    assert done["tag"] is None and TAG in done["warnings"][0]
    assert repo.tags == {}
    server.clear_faults()
    again = publisher.do("publish", folder=folder, hub=HUB)
    assert (again["already_published"], again["tag"], again["warnings"]) == (True, TAG, [])
    assert repo.tags == {TAG: repo.head()}


def test_a_tag_of_an_older_commit_stays_and_one_of_other_content_is_told(
    server: HubServer, publisher: Publisher, folder: str, tmp_path: Path
) -> None:
    repo = server.repository("org/zoo")
    empty = repo.head()
    first = publisher.do("publish", folder=folder, hub=HUB)
    repo.commit({"notes.txt": b"later"})
    again = publisher.do("publish", folder=folder, hub=HUB)
    assert (again["tag"], again["warnings"], repo.tags[TAG]) == (TAG, [], first["revision"])
    repo.move(TAG, empty)
    assert "other content" in publisher.do("publish", folder=folder, hub=HUB)["warnings"][0]
    assert repo.tags[TAG] == empty


def test_without_the_right_to_write_nothing_is_written(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    repo = server.repository("org/zoo")
    repo.write_token = "hf_owner"
    assert publisher.do("publish", folder=folder, hub=HUB)["error"].startswith("access")
    assert (len(repo.commits), repo.tags) == (1, {})


def test_a_hub_that_serves_other_bytes_afterwards_is_caught(
    server: HubServer, publisher: Publisher, folder: str
) -> None:
    server.repository("org/zoo")
    server.fault("flip", f"*{FILE_NAME}", at=10)
    assert publisher.do("publish", folder=folder, hub=HUB)["error"] == "integrity.digest"


def test_a_mirror_on_the_other_hub_has_the_same_digests(
    server: HubServer, publisher: Publisher, folder: str, tmp_path: Path
) -> None:
    other = str(
        write_folder(tmp_path / "other", artifact_files(artifact="tiny-qwen3-hard/other", seed=1))
    )
    repo = server.repository(
        "org/zoo", files={f"Bare/tag/{name}": data for name, data in payload(seed=2).items()}
    )
    for source in (folder, other):
        publisher.do("publish", folder=source, hub=HUB)
    names = {"Bare/tag", "tiny-qwen3-hard/other", str(HARD)}
    done = publisher.do("mirror", source=HUB, target="ms:org/copy", names=[], create=True)
    assert done == dict.fromkeys(names, "copied")
    copy = server.repository("org/copy", "ms")
    versions = [{p: d for p, d in r.files().items() if p.count("/") == 2} for r in (repo, copy)]
    assert versions[0] == versions[1] and len(versions[0]) == 8
    assert set(copy.tags) == {"oz-Bare-tag", "oz-tiny-qwen3-hard-other", TAG}
    place = [entry.hubs["hf"] for entry in index_of(copy).artifacts]
    assert {(p.repo, p.revision) for p in place} == {("org/zoo", repo.head())}
    commits = len(copy.commits)
    again = publisher.do("mirror", source=HUB, target="ms:org/copy", names=[])
    assert (again, len(copy.commits)) == (dict.fromkeys(names, "already there"), commits)
    back = publisher.do(
        "mirror", source="ms:org/copy", target="hf:org/back", names=["Bare"], create=True
    )
    assert back == {"Bare/tag": "copied"}
    bare = {p: d for p, d in server.repository("org/back").files().items() if p.startswith("Bare/")}
    assert bare == {p: d for p, d in repo.files().items() if p.startswith("Bare/")}


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
