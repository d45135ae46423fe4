import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from oscar_zoo import errors
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.hubs import remote
from oscar_zoo.registry.hubs.base import MAX_ROOT_BYTES, Change, Commit, HubFile
from oscar_zoo.registry.hubs.remote import MetadataCache, RemoteHub, git_oid

K = bytes(range(256)) * 20
QWEN = ArtifactId("Qwen3-8B", "seq1_prompt1_group128")
OLD, NEW = "0" * 40, "1" * 40
FILES = {
    f"{QWEN}/k.pt": K,
    f"{QWEN}/v.pt": K[::-1],
    f"{QWEN}/oscar.json": b'{"a": 1}',
    "Other/tag/k.pt": b"small",
    "index.json": b"{}",
    "README.md": b"# card\n",
}


@dataclass
class Repository:
    """Commits in memory; what was asked is counted, and content may be a lie."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {OLD: dict(FILES)})
    head: str = OLD
    lie: Callable[[bytes], bytes] | None = None
    lies: int = 1 << 30
    asked: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


class FakeHub(RemoteHub):
    """A view of a repository."""

    key = "hf:org/name https://hub.example"

    def __init__(self, source: Repository, revision: str | None = None) -> None:
        super().__init__("hf", "Some Hub", "org/name", revision)
        self.source = source

    def resolve(self, revision: str | None) -> str:
        self.source.asked.append(f"resolve {revision}")
        if revision not in (None, "main", *self.source.commits):
            raise errors.RevisionNotFound.for_hub(self.title, str(revision))
        return self.source.head if revision in (None, "main") else str(revision)

    def listing(self, revision: str) -> Mapping[str, HubFile]:
        self.source.asked.append("listing")
        found = {}
        for path, data in self.source.commits[revision].items():
            sha256 = hashlib.sha256(data).hexdigest() if path.endswith(".pt") else None
            found[path] = HubFile(path, len(data), sha256, None if sha256 else git_oid(data))
        return found

    def read(
        self,
        revision: str,
        file: HubFile,
        *,
        limit: int,
        progress: Callable[[int], None] | None = None,
    ) -> bytes:
        source = self.source
        source.asked.append(f"read {file.path}")
        data = source.commits[revision][file.path]
        if source.lie is not None and source.lies > 0:
            source.lies -= 1
            data = source.lie(data)
        if len(data) > limit:
            raise errors.MalformedFile("file.size", "too long")
        if progress is not None:
            progress(len(data))
        return data

    def create(self) -> None: ...

    def write(self, change: Change) -> Commit:
        self.source.changes.append(change)
        return Commit(NEW)

    def tag(self, name: str, revision: str | None, message: str) -> None: ...


def change(artifact: ArtifactId | None = None, parent: str | None = OLD) -> Change:
    return Change(
        artifact, {"k.pt": b"k"} if artifact else {}, {"index.json": b"[]"}, parent, "message"
    )


def test_all_answers_come_from_one_commit_until_refresh() -> None:
    source = Repository()
    hub = FakeHub(source)
    assert hub.root_file("index.json") == b"{}"
    source.commits[NEW] = FILES | {"index.json": b"[]", "New/tag/k.pt": b"new"}
    source.head = NEW
    assert (hub.revision, hub.root_file("index.json")) == (OLD, b"{}")
    assert ArtifactId("New", "tag") not in hub.artifacts()
    assert (hub.at(NEW).revision, hub.at(NEW).name) == (NEW, f"hf:org/name@{NEW}")
    hub.refresh()
    assert (hub.revision, hub.root_file("index.json")) == (NEW, b"[]")
    assert ArtifactId("New", "tag") in hub.artifacts()
    assert hub.at(OLD).root_file("index.json") == b"{}"


def test_artifacts_are_folders_of_two_good_names() -> None:
    odd = ["a/b", "a/b/c/d", "/a/b", "a//b", ".a/b/c", "a/.b/c", "a b/c/d", "a/../d", "ä/b/c"]
    odd += ["con/b/c", "A/b./c", "", "A/b/.hidden", "A/b/c d", "A/b/" + "x" * 101]
    hub = FakeHub(Repository({OLD: dict.fromkeys([*odd, "A/c/d"], b"x")}))
    assert hub.artifacts() == (ArtifactId("A", "c"),)
    with pytest.raises(errors.ArtifactNotFound):
        hub.files(ArtifactId("A", "b"))


def test_files_are_listed_by_plain_name() -> None:
    k, manifest, v = FakeHub(Repository()).files(QWEN)
    assert (k.path, k.size, v.path, v.size) == ("k.pt", len(K), "v.pt", len(K))
    assert k.sha256 == hashlib.sha256(K).hexdigest()
    assert manifest == HubFile("oscar.json", 8, None, git_oid(FILES[f"{QWEN}/oscar.json"]))


def test_what_is_not_there() -> None:
    hub = FakeHub(Repository())
    with pytest.raises(
        errors.ArtifactNotFound, match="Absent/tag is not on Some Hub org/name"
    ) as caught:
        hub.files(ArtifactId("Absent", "tag"))
    assert "oscar-zoo list --hub hf:org/name" in str(caught.value.hint)
    with pytest.raises(errors.ArtifactNotFound):
        hub.fetch(ArtifactId("qwen3-8b", QWEN.tag), "k.pt", limit=9)
    with pytest.raises(errors.NotFoundError, match=f"{QWEN} on Some Hub org/name has no file x.pt"):
        hub.fetch(QWEN, "x.pt", limit=9)
    with pytest.raises(errors.InvalidName):
        hub.fetch(QWEN, "../tag/k.pt", limit=9)
    assert hub.root_file("LICENSE") is None
    with pytest.raises(errors.InvalidName):
        hub.root_file("../index.json")


def test_fetch_gives_the_bytes_and_tells_how_many() -> None:
    told: list[tuple[str, int, int]] = []
    hub = FakeHub(Repository())
    for _ in range(2):  # the second manifest comes from the cache
        for name in ("k.pt", "oscar.json"):
            full = FILES[f"{QWEN}/{name}"]
            got = hub.fetch(QWEN, name, limit=len(K), progress=lambda *each: told.append(each))
            assert got == full
            assert told.pop() == (name, len(full), len(full))


def test_a_listed_size_beyond_the_limit_costs_no_request() -> None:
    source = Repository({OLD: FILES | {"index.json": b"x" * (MAX_ROOT_BYTES + 1)}})
    hub = FakeHub(source)
    for call in (
        lambda: hub.fetch(QWEN, "k.pt", limit=len(K) - 1),
        lambda: hub.fetch(QWEN, "oscar.json", limit=7),
        lambda: hub.root_file("index.json"),
    ):
        with pytest.raises(errors.MalformedFile) as caught:
            call()
        assert caught.value.reason == "file.size"
    assert source.asked == ["resolve None", "listing"]
    assert hub.fetch(QWEN, "oscar.json", limit=8)
    with pytest.raises(errors.MalformedFile):  # from the cache too
        hub.fetch(QWEN, "oscar.json", limit=7)


LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "flipped": (lambda data: bytes([data[0] ^ 1]) + data[1:], "arrived with"),
    "short": (lambda data: data[:-1], "bytes, not the"),
    "long": (lambda data: data + b"x", "too long"),
    "empty": (lambda data: b"", "arrived empty, not the"),
    "page": (lambda data: b"<html>"[: len(data) - 1], "arrived as a web page, not the"),
    "pointer": (lambda data: b"version https://git-lfs"[: len(data) - 1], "arrived as"),
}


@pytest.mark.parametrize("name", ["oscar.json", "v.pt"])
@pytest.mark.parametrize("lie", LIES)
def test_other_content_is_fetched_once_more_and_then_refused(name: str, lie: str) -> None:
    wrong, words = LIES[lie]
    path = f"{QWEN}/{name}"
    source = Repository(lie=wrong, lies=1)
    assert FakeHub(source).fetch(QWEN, name, limit=1 << 20) == FILES[path]
    assert source.asked.count(f"read {path}") == 2
    source = Repository({NEW: dict(FILES)}, NEW, lie=wrong)
    with pytest.raises((errors.DigestMismatchError, errors.MalformedFile), match=words):
        FakeHub(source).fetch(QWEN, name, limit=1 << 20)
    assert source.asked.count(f"read {path}") == 2


def test_refused_metadata_is_not_kept() -> None:
    source = Repository(lie=lambda data: data[::-1])
    for read in (
        lambda: FakeHub(source).fetch(QWEN, "oscar.json", limit=99),
        lambda: FakeHub(source).root_file("README.md"),
    ):
        with pytest.raises(errors.DigestMismatchError, match="git oid"):
            read()
        source.lies = 0
        assert read()
        source.lies = 99


def test_what_is_kept_must_match_the_listing_too() -> None:
    source = Repository()
    MetadataCache(FakeHub.key).once(OLD, "files/index.json", lambda: b"[]")
    assert FakeHub(source).root_file("index.json") == b"{}"


def test_a_file_in_lfs_may_be_listed_by_the_oid_of_its_pointer() -> None:
    """As git knows it: `git hash-object` of the pointer that `git lfs` makes of `hello` and a
    newline."""
    oid = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 6\n"
    listed = HubFile("k.pt", 6, None, git_oid(pointer.encode()))
    assert remote.difference(listed, b"hello\n") is None
    assert "git oid" in str(remote.difference(listed, b"jello\n"))


@pytest.mark.parametrize("artifact", [QWEN, ArtifactId("qwen3-8b", "SEQ1_prompt1_group128")])
def test_a_version_is_never_sent_again_to_where_the_change_starts(artifact: ArtifactId) -> None:
    source = Repository({OLD: dict(FILES), NEW: {"index.json": b"{}"}}, NEW)
    hub = FakeHub(source)
    assert hub.artifacts() == ()
    with pytest.raises(errors.StaleRevision):
        hub.commit(change(artifact, parent=OLD))
    assert source.changes == []
    hub.commit(change(artifact, parent=NEW))


def test_a_view_of_a_revision_is_not_published_to() -> None:
    source = Repository()
    with pytest.raises(errors.UsageError, match="hf:org/name@main is a view") as caught:
        FakeHub(source, revision="main").commit(change())
    assert (source.changes, caught.value.hint) == ([], "publish to hf:org/name")
