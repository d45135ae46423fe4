from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import time
from collections import defaultdict
from pathlib import Path

import pytest
from failing_calls import Injection, killed_at, raise_error
from publisher import content, publish_rounds

from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import ArtifactNotFound, InvalidName, MalformedFile, PathNotFound, StorageError, VersionExists
from oscar_zoo.hubs.local import LocalHub

ID = ArtifactId("Model", "tag")
FILES = {"k.pt": b"keys" * 100, "v.pt": b"values" * 100, "oscar.json": b"{}"}


@pytest.fixture
def hub(tmp_path: Path) -> LocalHub:
    return LocalHub(tmp_path / "hub", must_exist=False)


def temps(hub: LocalHub) -> list[str]:
    return [path.name for path in hub.root.rglob(".tmp.*")]


def test_what_was_published_is_listed_and_fetched(hub: LocalHub) -> None:
    seen: list[tuple[str, int, int]] = []
    assert hub.artifacts() == ()
    assert hub.commit(ID, FILES)
    assert hub.artifacts() == (ID,)
    assert [(f.path, f.size, f.sha256) for f in hub.files(ID)] == [
        (name, len(data), sha256_hex(data)) for name, data in sorted(FILES.items())
    ]
    assert hub.fetch(ID, "k.pt", limit=400, progress=lambda *call: seen.append(call)) == FILES["k.pt"]
    assert seen == [("k.pt", 400, 400)]
    assert temps(hub) == []


def test_publishing_again_is_success_and_changes_nothing(hub: LocalHub) -> None:
    hub.commit(ID, FILES)
    inode = (hub.root / "Model" / "tag").stat().st_ino
    assert not hub.commit(ID, dict(reversed(FILES.items())))
    assert (hub.root / "Model" / "tag").stat().st_ino == inode


@pytest.mark.parametrize(
    ("files", "changed"),
    [
        ({**FILES, "k.pt": b"other"}, "k.pt"),
        ({**FILES, "more.pt": b""}, "more.pt"),
        ({"k.pt": FILES["k.pt"]}, "oscar.json, v.pt"),
        ({**FILES, "oscar.json": b"{ }"}, "oscar.json"),
    ],
)
def test_a_version_is_never_replaced(hub: LocalHub, files: dict[str, bytes], changed: str) -> None:
    hub.commit(ID, FILES)
    with pytest.raises(VersionExists) as caught:
        hub.commit(ID, files)
    assert changed in caught.value.message
    assert {f.path: f.sha256 for f in hub.files(ID)} == {name: sha256_hex(data) for name, data in FILES.items()}
    assert temps(hub) == []


def test_a_version_that_differs_only_in_case_is_refused(hub: LocalHub) -> None:
    hub.commit(ID, FILES)
    with pytest.raises(VersionExists, match="Model/tag"):
        hub.commit(ArtifactId("model", "TAG"), FILES)


def test_a_folder_of_plain_files_is_a_hub(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B" / "seq1_prompt1_group128"
    folder.mkdir(parents=True)
    (folder / "k.pt").write_bytes(b"1")
    (folder / ".hidden").write_bytes(b"2")
    (tmp_path / "README.md").write_text("not an artifact")
    (tmp_path / "Qwen3-8B" / "empty").mkdir()
    (tmp_path / ".tmp.0").mkdir()
    hub = LocalHub(tmp_path)
    assert hub.artifacts() == (ArtifactId("Qwen3-8B", "seq1_prompt1_group128"),)
    assert [f.path for f in hub.files(hub.artifacts()[0])] == ["k.pt"]


def test_a_missing_folder_is_an_error_unless_it_is_the_default_zoo(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match="nowhere"):
        LocalHub(tmp_path / "nowhere").artifacts()
    assert LocalHub(tmp_path / "nowhere", must_exist=False).artifacts() == ()
    assert not (tmp_path / "nowhere").exists()


def test_a_read_only_hub_can_be_read(hub: LocalHub) -> None:
    hub.commit(ID, FILES)
    for path in (hub.root / "Model" / "tag", hub.root / "Model", hub.root):
        path.chmod(0o555)
    try:
        assert hub.artifacts() == (ID,)
        assert hub.fetch(ID, "v.pt", limit=1000) == FILES["v.pt"]
    finally:
        for path in (hub.root, hub.root / "Model", hub.root / "Model" / "tag"):
            path.chmod(0o755)


def test_links_are_not_followed(hub: LocalHub, tmp_path: Path) -> None:
    hub.commit(ID, FILES)
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (hub.root / "Model" / "tag" / "link.pt").symlink_to(secret)
    (hub.root / "Model" / "linked").symlink_to(hub.root / "Model" / "tag")
    (hub.root / "Linked").symlink_to(hub.root / "Model")
    assert hub.artifacts() == (ID,)
    with pytest.raises(MalformedFile):
        hub.files(ID)
    with pytest.raises(MalformedFile):
        hub.fetch(ID, "link.pt", limit=100)
    for artifact in (ArtifactId("Model", "linked"), ArtifactId("Linked", "tag")):
        with pytest.raises(MalformedFile):
            hub.fetch(artifact, "k.pt", limit=1000)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".hidden", "k.pt\n", "con.pt", ""])
def test_unsafe_names_are_refused(hub: LocalHub, name: str) -> None:
    hub.commit(ID, FILES)
    with pytest.raises(InvalidName):
        hub.fetch(ID, name, limit=100)
    with pytest.raises(InvalidName):
        hub.commit(ArtifactId("Model", "other"), {name: b"x"})
    with pytest.raises(InvalidName):
        hub.files(ArtifactId("Model", name))
    assert hub.artifacts() == (ID,)


def test_a_file_longer_than_listed_and_a_pipe_are_refused(hub: LocalHub) -> None:
    hub.commit(ID, FILES)
    with pytest.raises(MalformedFile) as caught:
        hub.fetch(ID, "k.pt", limit=399)
    assert caught.value.reason == "file.size"
    os.mkfifo(hub.root / "Model" / "tag" / "pipe.pt")
    with pytest.raises(MalformedFile):
        hub.fetch(ID, "pipe.pt", limit=100)


def test_what_is_not_there_is_not_found(hub: LocalHub) -> None:
    hub.commit(ID, FILES)
    with pytest.raises(ArtifactNotFound, match="Model/no"):
        hub.files(ArtifactId("Model", "no"))
    with pytest.raises(PathNotFound):
        hub.fetch(ID, "no.pt", limit=100)


def test_old_leftovers_of_this_user_are_removed(hub: LocalHub) -> None:
    hub.commit(ID, FILES)
    old, young = hub.root / ".tmp.old", hub.root / ".tmp.young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "k.pt").write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    hub.commit(ArtifactId("Model", "next"), FILES)
    assert temps(hub) == [".tmp.young"]


def test_published_files_are_readable_by_all_and_writable_by_the_owner(hub: LocalHub) -> None:
    hub.commit(ID, FILES)
    assert stat.S_IMODE((hub.root / "Model" / "tag" / "k.pt").stat().st_mode) == 0o644


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failing_disk_leaves_nothing_or_everything(tmp_path: Path, code: int, stays: bool) -> None:
    for number in range(1, 200):
        hub = LocalHub(tmp_path / str(number), must_exist=False)
        injection = Injection(number, raise_error(code), stays=stays)
        try:
            with injection.active():
                hub.commit(ID, FILES)
        except StorageError as error:
            assert os.strerror(code) in error.message
            assert error.hint
        assert hub.artifacts() in ((), (ID,))
        assert hub.commit(ID, FILES) or hub.artifacts() == (ID,)
        assert {f.path: f.sha256 for f in hub.files(ID)} == {name: sha256_hex(data) for name, data in FILES.items()}
        if not injection.fired:
            break
    assert 20 < number < 199


def test_a_killed_publisher_leaves_nothing_or_everything(tmp_path: Path) -> None:
    for number in range(1, 200):
        hub = LocalHub(tmp_path / str(number), must_exist=False)
        killed = killed_at(number, lambda hub=hub: hub.commit(ID, FILES))  # type: ignore[misc]
        assert hub.artifacts() in ((), (ID,))
        hub.commit(ID, FILES)
        assert {f.path: f.sha256 for f in hub.files(ID)} == {name: sha256_hex(data) for name, data in FILES.items()}
        if not killed:
            break
    assert 20 < number < 199


def test_two_publishers_never_mix_a_version(tmp_path: Path) -> None:
    rounds = 8
    spawn = multiprocessing.get_context("spawn")
    barrier, answers = spawn.Barrier(2), spawn.Queue()
    processes = [
        spawn.Process(target=publish_rounds, args=(str(tmp_path), who, rounds, barrier, answers)) for who in (1, 2)
    ]
    for process in processes:
        process.start()
    told: dict[int, dict[int, str]] = defaultdict(dict)
    for _ in range(2 * rounds):
        number, who, answer = answers.get(timeout=60)
        told[number][who] = answer
    for process in processes:
        process.join(60)
    hub = LocalHub(tmp_path)
    for number in range(rounds):
        assert sorted(told[number].values()) == ["exists", "new"]
        (winner,) = (who for who, answer in told[number].items() if answer == "new")
        there = {f.path: f.sha256 for f in hub.files(ArtifactId("Model", f"round{number}"))}
        assert there == {name: sha256_hex(data) for name, data in content(winner).items()}
    assert temps(hub) == []
