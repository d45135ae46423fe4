import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from oscar_zoo import paths
from oscar_zoo.errors import ForeignFolder
from oscar_zoo.registry.hubs import remote
from oscar_zoo.registry.hubs.remote import MAX_COMMITS, MetadataCache, kept_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Counts what is fetched."""

    def __init__(self, data: bytes = b"content") -> None:
        self.data = data
        self.asked = 0

    def __call__(self) -> bytes:
        self.asked += 1
        return self.data


def kept() -> list[Path]:
    found = (paths.cache_dir() / "hubs").rglob("*")
    return sorted(path for path in found if path.is_file() and path.suffix != ".lock")


@pytest.mark.parametrize("data", [b"", b"\n", b"content", bytes(range(256)) * 100])
def test_a_file_at_a_commit_is_fetched_once(data: bytes) -> None:
    hub = Hub(data)
    for _ in range(3):
        assert MetadataCache("hub").once(COMMIT, "files/index.json", hub) == data
        assert MetadataCache("hub").once(COMMIT, "listing.json", hub) == data
    assert hub.asked == 2


def test_hubs_commits_and_names_are_kept_apart() -> None:
    def fetch(cache: MetadataCache, commit: str, path: str) -> bytes:
        return cache.once(commit, kept_name(path), f"{cache} {commit} {path}".encode)

    caches = [MetadataCache("hf:a/b https://one"), MetadataCache("hf:a/b https://two")]
    names = ["index.json", "listing.json", "A/b/oscar.json", "A%2Fb/oscar.json", "a/b/oscar.json"]
    names += ["../x", "files", f"{'M' * 100}/{'t' * 100}/oscar.json"]
    for cache in caches:
        cache.once(COMMIT, "listing.json", lambda: b"a listing")
    wanted = list(itertools.product(caches, [COMMIT, COMMIT[::-1]], names))
    for _ in range(2):
        assert len({fetch(*each) for each in wanted}) == len(wanted)
    root = paths.cache_dir() / "hubs"
    kept_ones = [path for path in paths.cache_dir().rglob("*") if path != root]
    assert all(path.is_relative_to(root) and len(path.name) < 255 for path in kept_ones)


@pytest.mark.parametrize(
    "revision", ["main", "v1", COMMIT[:39], COMMIT + "0", COMMIT.upper(), "../../x", ""]
)
def test_what_may_move_is_not_kept(revision: str) -> None:
    hub, cache = Hub(), MetadataCache("hub")
    assert cache.once(revision, "listing.json", hub) == cache.once(revision, "listing.json", hub)
    assert hub.asked == 2
    assert not paths.cache_dir().exists()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "other": lambda path: path.write_bytes(b"other content"),
    "empty": lambda path: path.write_bytes(b""),
    "link": lambda path: path.symlink_to(path.rename(path.with_suffix(".real"))),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "huge": lambda path: os.truncate(path, remote.MAX_FILE_BYTES + 4096),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_fetched_again(damage: Callable[[Path], object]) -> None:
    hub = Hub()
    MetadataCache("hub").once(COMMIT, "files/oscar.json", hub)
    (place,) = kept()
    damage(place)
    assert MetadataCache("hub").once(COMMIT, "files/oscar.json", hub) == hub.data
    assert hub.asked == 2
    assert MetadataCache("hub").once(COMMIT, "files/oscar.json", hub) == hub.data


def test_only_the_newest_commits_are_kept() -> None:
    commits = [f"{number:040x}" for number in range(MAX_COMMITS + 5)]
    for age, commit in enumerate(reversed(commits)):
        MetadataCache("hub").once(commit, "listing.json", Hub())
        (home,) = (paths.cache_dir() / "hubs").iterdir()
        for each in home.iterdir():
            if each.name == commit:
                os.utime(each, (age * 1000, age * 1000))
    MetadataCache("other").once(COMMIT, "listing.json", Hub())
    left = [entry.name for entry in home.iterdir() if len(entry.name) == 40]
    assert sorted(left) == commits[:MAX_COMMITS]


def test_folders_are_private() -> None:
    MetadataCache("hub").once(COMMIT, "files/oscar.json", Hub())
    for path in [paths.cache_dir(), *paths.cache_dir().rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("depth", [0, 2])
def test_a_folder_that_others_can_write_is_not_used(depth: int) -> None:
    MetadataCache("hub").once(COMMIT, "listing.json", Hub(b"planted"))
    (place,) = kept()
    [paths.cache_dir(), None, place.parents[1]][depth].chmod(0o777)  # type: ignore[union-attr]
    assert MetadataCache("hub").once(COMMIT, "listing.json", Hub()) == b"content"


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder away")
@pytest.mark.parametrize("depth", range(5))
def test_a_folder_of_another_user_is_an_error_and_stays_as_it_is(depth: int) -> None:
    """The cache, all hubs, this hub, its commit, and the files of that."""
    cache = MetadataCache("hub")
    cache.once(COMMIT, "files/index.json", Hub(b"planted"))
    (place,) = kept()
    os.chown(place.parents[4 - depth], 54321, 54321)
    before = sorted(paths.cache_dir().rglob("*"))
    for use in (
        lambda: cache.once(COMMIT, "files/index.json", Hub()),
        lambda: cache.copies("index.json"),
    ):
        with pytest.raises(ForeignFolder, match="54321"):
            use()
    cache.note_answer()
    assert remote.newest_files("index.json") == []
    answered = place.parents[2] / "answered" if depth > 2 else None
    assert {*paths.cache_dir().rglob("*")} - {answered} == set(before)


def test_a_disk_that_takes_nothing_only_costs_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    hub = Hub()
    monkeypatch.setattr(os, "replace", refuse)
    assert MetadataCache("hub").once(COMMIT, "listing.json", hub) == b"content"
    monkeypatch.setattr(os, "open", refuse)
    assert MetadataCache("other").once(COMMIT, "listing.json", hub) == b"content"
    monkeypatch.setattr(os, "mkdir", refuse)
    assert MetadataCache("third").once(COMMIT, "listing.json", hub) == b"content"
    monkeypatch.undo()
    assert hub.asked == 3


def test_threads_that_need_the_same_fetch_it_once() -> None:
    hub, start = Hub(), threading.Barrier(8)
    got: list[bytes] = []

    def need() -> None:
        start.wait(300)
        got.append(MetadataCache("hub").once(COMMIT, "listing.json", hub))

    threads = [threading.Thread(target=need) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert got == [b"content"] * 8
    assert hub.asked == 1
