import contextlib
import json
import multiprocessing
from pathlib import Path

import pytest
from scripted_hub import Injection, killed_at, raise_error

from oscar_zoo.artifact.files import FileDigest, artifact_digest
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.errors import AmbiguousName, MalformedFile, StorageError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.pins import LOCK_NAME, Pin, PinFile, Pins, project_root
from oscar_zoo.registry.trust import Trust


def pin(artifact: str = "Model/tag", *, content: str = "a", manifest: str | None = None) -> Pin:
    """A pin of one file whose sha256 is `content`, 64 times."""
    sha256 = content * 64
    return Pin(
        id=artifact,
        digest=artifact_digest([FileDigest("k.pt", sha256, 5)]),
        files=(FileDigest("k.pt", sha256, 5),),
        manifest_sha256=manifest,
        hub="hf:org/zoo",
        revision="0" * 40,
        first_seen="2026-01-02T03:04:05Z",
        source="listing",
    )


def record(file: PinFile, *pins: Pin) -> None:
    for one in pins:
        file.update(lambda before, one=one: before.with_pin(one))  # type: ignore[misc]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = PinFile(tmp_path / "deep" / "folder" / LOCK_NAME)
    assert file.read() == Pins.empty()
    record(file, pin("B/two"), pin("A/one"))
    assert [p.id for p in file.read().artifacts] == ["A/one", "B/two"]
    assert file.read().pin(ArtifactId("b", "TWO")) == pin("B/two")
    assert json.loads(file.path.read_bytes())["schema"] == "oscar-zoo.lock/1"


@pytest.mark.parametrize(
    ("hub", "written"),
    [
        ("file:/data/project/zoo", "file:zoo"),
        ("file:/data/.local/zoo", "file:../.local/zoo"),
        ("file:/srv/zoo", "file:/srv/zoo"),
        ("hf:org/zoo", "hf:org/zoo"),
    ],
)
def test_a_lock_names_a_folder_as_it_lies_to_itself(tmp_path: Path, hub: str, written: str) -> None:
    """It is committed, and a home folder has another name elsewhere."""
    there = pin().model_copy(update={"hub": hub})
    near = Pins.empty().with_pin(there).seen_from(Path("/data/project"))
    assert near.artifacts[0].hub == written
    file = PinFile(tmp_path / LOCK_NAME)
    record(file, there := pin().model_copy(update={"hub": f"file:{tmp_path}/zoo"}))
    assert file.read().artifacts == (there,) and str(tmp_path) not in file.path.read_text()


def test_the_same_bytes_keep_their_first_pin_and_the_file_untouched(tmp_path: Path) -> None:
    file = PinFile(tmp_path / LOCK_NAME)
    record(file, pin())
    before = file.path.stat()
    record(
        file, pin().model_copy(update={"first_seen": "2027-01-01T00:00:00Z", "hub": "ms:other/zoo"})
    )
    assert file.read().artifacts == (pin(),)
    assert file.path.stat().st_mtime_ns == before.st_mtime_ns
    record(file, pin(content="b"))
    assert file.read().artifacts == (pin(content="b"),)


def test_a_name_means_the_pin_a_tag_or_a_digest_says() -> None:
    pins = Pins.empty().with_pin(pin("Model/one")).with_pin(pin("Model/two", content="b"))
    find = lambda text, default=None: pins.find(Reference.parse(text), None, default)  # noqa: E731
    assert find("model:ONE").id == "Model/one"
    assert find("Model/two").id == "Model/two"
    assert find("org/Model:two").id == "Model/two"
    assert find(f"model@{pin(content='b').digest[:30]}").id == "Model/two"
    assert find("model", "two").id == "Model/two"
    assert find("model:three") is None
    assert find("other") is None
    with pytest.raises(AmbiguousName):
        find("model")


def test_a_lock_that_pins_several_versions_says_that_it_does(tmp_path: Path) -> None:
    """A version that was withdrawn since then is among them, so the hub would not say the same."""
    file = PinFile(tmp_path / LOCK_NAME)
    record(file, pin("Model/one"), pin("Model/two", content="b"))
    trust, catalog = Trust(lock=file), Catalog.packaged()
    with pytest.raises(AmbiguousName, match=r"Model:one, Model:two, which oscar-zoo\.lock pins\."):
        trust.pinned(Reference.parse("Model"), catalog)
    found = trust.pinned(Reference.parse("Model:two"), catalog)
    assert found is not None and found.id == "Model/two"


def test_the_lock_of_a_project_is_the_nearest_up_to_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "project" / "src" / "deep"
    inner.mkdir(parents=True)
    assert PinFile.of_project(inner).path == inner / LOCK_NAME
    (tmp_path / LOCK_NAME).write_text("{}")
    assert PinFile.of_project(inner).path == tmp_path / LOCK_NAME
    (tmp_path / "project" / ".git").mkdir()
    assert PinFile.of_project(inner).path == tmp_path / "project" / LOCK_NAME
    (tmp_path / "project" / LOCK_NAME).write_text("{}")
    monkeypatch.chdir(inner)
    assert PinFile.of_project().path == tmp_path / "project" / LOCK_NAME


def test_home_and_the_root_are_no_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / ".git").mkdir(parents=True)  # as of people who keep their settings in git
    work = home / "work" / "src"
    work.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    assert project_root(home) is None and project_root(work) is None
    assert project_root(Path("/")) is None
    for marker in ("pyproject.toml", ".git", ".hg"):
        (home / "work" / marker).touch()
        assert project_root(work) == home / "work" == project_root(home / "work")
        (home / "work" / marker).unlink()


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v | {"schema": "oscar-zoo.lock/2"},
        lambda v: v | {"more": 1},
        lambda v: v | {"artifacts": v["artifacts"] * 2},
        lambda v: v | {"artifacts": [v["artifacts"][0] | {"digest": "sha256:" + "0" * 64}]},
        lambda v: v | {"artifacts": [v["artifacts"][0] | {"id": "../x"}]},
        lambda v: [v],
    ],
)
def test_a_lock_that_was_tampered_with_is_refused(tmp_path: Path, change: object) -> None:
    file = PinFile(tmp_path / LOCK_NAME)
    record(file, pin())
    value = change(json.loads(file.path.read_bytes()))  # type: ignore[operator]
    file.path.write_text(json.dumps(value))
    with pytest.raises(MalformedFile) as caught:
        file.read()
    assert LOCK_NAME in caught.value.message
    with pytest.raises(MalformedFile):
        record(file, pin("New/pin"))
    assert json.loads(file.path.read_bytes()) == value


@pytest.mark.parametrize("what", ["a full disk", "a kill"])
def test_whatever_stops_it_leaves_the_old_lock_or_the_new_one(tmp_path: Path, what: str) -> None:
    for number in range(1, 40):
        file = PinFile(tmp_path / str(number) / LOCK_NAME)
        record(file, pin())
        if what == "a kill":
            stopped = killed_at(number, lambda file=file: record(file, pin("New/pin")))  # type: ignore[misc]
        else:
            injection = Injection(number, raise_error(), stays=True)
            with contextlib.suppress(StorageError), injection.active():
                record(file, pin("New/pin"))
            stopped = injection.fired
        assert [p.id for p in file.read().artifacts] in (["Model/tag"], ["Model/tag", "New/pin"])
        assert file.read().pin(ArtifactId("Model", "tag")) == pin()
        if not stopped:
            break
    assert 5 < number < 39


def _record_many(path: str, worker: int) -> None:
    for number in range(10):
        record(PinFile(Path(path)), pin(f"Model/w{worker}n{number}"))


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    workers = [multiprocessing.Process(target=_record_many, args=(str(path), n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(PinFile(path).read().artifacts) == 40
