"""A folder is replaced whole or not at all, and only when it is an artifact."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_hub import Injection, killed_at, raise_error

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.compute.folder import check_target, write_folder
from oscar_zoo.errors import OutputExists, StorageError, UsageError

PACKAGED = (
    Path(__file__).resolve().parents[2] / "manifests/Qwen3-8B/seq20000_prompt83_group128.json"
)
FILES = {"a.pt": b"new a", "oscar.json": b"{}"}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A folder with a real manifest and the files it lists."""
    manifest = Manifest.from_bytes(PACKAGED.read_bytes(), registry=True).immutable()
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "oscar.json").write_bytes(manifest.to_bytes())
    for file in manifest.files:
        (folder / file.path).write_bytes(b"old")
    return folder


def test_an_absent_or_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "a/b/c", tmp_path / "empty"):
        write_folder(target, FILES, force=False)
        assert content(target) == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"a", "empty"}


def test_an_artifact_is_replaced_only_on_demand(artifact: Path) -> None:
    before = content(artifact)
    with pytest.raises(OutputExists, match="already holds an artifact"):
        write_folder(artifact, FILES, force=False)
    assert content(artifact) == before
    write_folder(artifact, FILES, force=True)
    assert content(artifact) == FILES
    assert [path.name for path in artifact.parent.iterdir()] == ["out"]


def test_other_files_are_never_replaced(artifact: Path, tmp_path: Path) -> None:
    (artifact / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match=r"notes\.txt"):
        write_folder(artifact, FILES, force=True)
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(OutputExists, match="other files"):
        write_folder(other, FILES, force=True)
    assert content(other) == {"cat.jpg": b"cat"}


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(UsageError, match="is a file"):
            check_target(target, force=True)


@pytest.mark.parametrize("name", ["nowhere", "loop", "no-utf8-\udcff"])
def test_a_target_that_could_not_be_saved_is_refused_first(tmp_path: Path, name: str) -> None:
    target = tmp_path / "loop"
    target.symlink_to(tmp_path / name)
    with pytest.raises(UsageError, match=r"link to nothing|UTF-8"):
        check_target(target if name != "no-utf8-\udcff" else tmp_path / name, force=True)
    assert [*tmp_path.iterdir()] == [target]


def test_a_full_disk_leaves_the_old_artifact(artifact: Path) -> None:
    before, at = content(artifact), 0
    while True:
        at += 1
        failure = Injection(at, raise_error())
        try:
            with failure.active():
                write_folder(artifact, FILES, force=True)
        except StorageError as error:
            assert "No space left" in error.message
        if not failure.fired:
            break
        if content(artifact) != before:
            assert content(artifact) == FILES  # the failure came after the rename
            break
    assert at > 5


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_any_call_leaves_nothing_half_written(tmp_path: Path) -> None:
    for at in itertools.count(1):
        target = tmp_path / str(at) / "out"
        killed = killed_at(at, functools.partial(write_folder, target, FILES, force=False))
        assert not target.exists() or content(target) == FILES
        if not killed:
            break
    assert at > 5
    assert content(target) == FILES


def test_what_a_killed_run_left_goes_also_when_the_artifact_stands_there_already(
    tmp_path: Path, artifact: Path
) -> None:
    """A run that is killed behind its artifact, while it writes the report."""
    killed = (
        "import os, pathlib, signal, sys\n"
        "from oscar_zoo.artifact import durable\n"
        "durable.temp_path(pathlib.Path(sys.argv[1])).write_bytes(b'half')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", killed, tmp_path], check=False)
    assert len(list(tmp_path.glob(".tmp.*"))) == 1
    with pytest.raises(OutputExists):
        check_target(artifact, force=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
