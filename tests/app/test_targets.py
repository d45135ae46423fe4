"""A text is parsed once, into what it is: a path, a folder with a model, or a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.artifact.names import Reference
from oscar_zoo.cli.main import run
from oscar_zoo.errors import ArtifactNotFound, PathNotFound, UsageError
from oscar_zoo.observer import Note, Silent
from oscar_zoo.registry.targets import (
    ModelTarget,
    NameTarget,
    PathTarget,
    looking_up,
    parse,
    parse_name,
    parse_named,
)
from oscar_zoo.registry.verify import artifacts_at


class Heard(Silent):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def note(self, note: Note) -> None:
        self.notes.append(note)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model_in(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("text", ["./somewhere", "/srv/zoo", "K.pt", "folder/"])
def test_what_is_written_as_a_path_is_one(text: str) -> None:
    assert parse(text) == PathTarget(text, Path(text))


def test_everything_else_is_a_name_with_its_namesake(here: Path) -> None:
    assert parse("Qwen3-8B:tag") == NameTarget("Qwen3-8B:tag", Reference("Qwen3-8B", "tag"))
    (here / "mine").mkdir()
    target = parse("mine")
    assert isinstance(target, NameTarget)
    assert target.namesake == Path("mine") and target.model_namesake is None


def test_a_folder_with_a_model_stands_for_the_artifact_of_its_name(here: Path) -> None:
    model_in(here / "my model")
    target = parse("./my model")
    assert isinstance(target, ModelTarget)
    assert target.reference == Reference("my-model") and target.path == Path("my model")
    assert parse_named("./my model") == target
    with pytest.raises(UsageError, match="is a path; this takes a name"):
        parse_name("./my model")


def test_a_model_stays_a_model_whatever_lies_in_a_folder_of_it(here: Path) -> None:
    """Rotation files beside its `config.json` make an artifact of the folder, and none deeper."""
    folder = model_in(here / "mine")
    write_folder(folder / "mine/seq2000_prompt4_group64", artifact_files())
    target = parse_named("./mine")
    assert isinstance(target, ModelTarget) and target.reference == Reference("mine")
    name = parse("mine")
    assert isinstance(name, NameTarget) and name.model_namesake == Path("mine")
    (folder / "k_rotation.pt").write_bytes(b"")
    assert parse("./mine") == PathTarget("./mine", Path("mine"))


TRAINING = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")


def checkpoint_in(folder: Path, config: str = '{"architectures": ["Qwen3ForCausalLM"]}') -> Path:
    """A model's folder as training leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"weights")
    for name in TRAINING:
        (folder / name).write_bytes(b"state")
    return folder


@pytest.mark.parametrize("config", ['{"architectures": ["A"]}', '{"model_type": "qwen3"}'])
def test_what_training_leaves_beside_a_model_is_no_rotation(here: Path, config: str) -> None:
    folder = checkpoint_in(here / "run" / "checkpoint-500", config)
    assert isinstance(parse("./run/checkpoint-500"), ModelTarget)
    with pytest.raises(PathNotFound, match=r"no rotation files in .*run"):
        artifacts_at(Path("run"))
    write_folder(folder / "rotation", artifact_files())
    assert artifacts_at(Path("run")).artifacts == [Path("run/checkpoint-500/rotation")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "k_rotation.pt").write_bytes(b""),
        lambda folder: (folder / "V-rotation.pt").write_bytes(b""),
        lambda folder: (folder / "oscar.json").write_text("{}"),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "config.json").write_bytes(b"\xff{"),
        lambda folder: (folder / "model.safetensors").rename(folder / "statistics.safetensors"),
    ],
)
def test_rotations_by_name_or_no_model_make_an_artifact(
    here: Path, spoil: Callable[[Path], object]
) -> None:
    folder = checkpoint_in(here / "mine")
    (folder / "training_args.bin").unlink()
    spoil(folder)
    assert parse("./mine") == PathTarget("./mine", Path("mine"))
    assert artifacts_at(Path("mine")).artifacts == [Path("mine")]


def test_a_command_that_takes_names_refuses_paths(here: Path) -> None:
    """It offers a command for what lies there, and none where nothing could work."""
    write_folder(here / "a b", artifact_files())
    (here / "empty").mkdir()
    for parse_it in (parse_named, parse_name):
        with pytest.raises(UsageError, match="is a path; this takes a name") as caught:
            parse_it("./a b")
        assert caught.value.hint == "it is here already: oscar-zoo verify './a b'"
        with pytest.raises(PathNotFound, match="and no rotations in"):
            parse_it("./empty")
        with pytest.raises(PathNotFound, match="no such file or folder") as missing:
            parse_it("./nope")
        assert "verify" not in (missing.value.hint or "")


def test_a_path_without_its_dot_has_one_exit_code(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However deep it lies, and whatever command it is given to."""
    folders = ("rotation", "a/rotation", "a/b/rotation")
    commands = ["verify", "info", "eval", "serve", "compare ./one", "fit-gpu --memory 9GB"]
    write_folder(here / "one", artifact_files())
    for folder in folders:
        write_folder(here / folder, artifact_files())
        for words in map(str.split, commands):
            assert run([*words, folder]) == 3, (words, folder)
            said = capsys.readouterr().err
            assert f"Did you mean the folder ./{folder}" in said, (words, said)


def test_a_namesake_is_mentioned_in_a_note_or_in_the_error(here: Path) -> None:
    (here / "mine").mkdir()
    target, heard = parse("mine"), Heard()
    with looking_up(target, heard):
        pass
    assert [note.code for note in heard.notes] == ["target.namesake"]
    with pytest.raises(ArtifactNotFound) as caught, looking_up(target, heard):
        raise ArtifactNotFound.for_name("mine")
    assert caught.value.hint == "did you mean the folder ./mine?" and len(heard.notes) == 1
