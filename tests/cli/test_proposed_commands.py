"""The command that an error proposes keeps what was typed, and works as printed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from cli_output import TINY, refused
from tiny_artifacts import K_NAME, artifact_files, write_folder

from oscar_zoo.cli.main import run

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TAG = "seq512_prompt2_group64"


@pytest.fixture
def hub(tmp_path: Path) -> str:
    """A folder that no configuration names, with one artifact."""
    write_folder(tmp_path / "hub" / TINY / TAG, artifact_files())
    return f"file:{tmp_path / 'hub'}"


@pytest.fixture
def empty(tmp_path: Path) -> str:
    (tmp_path / "empty").mkdir()
    return f"file:{tmp_path / 'empty'}"


def proposed(line: str) -> list[str]:
    """The arguments of the last command in the line of an error."""
    return shlex.split(line.rpartition("oscar-zoo ")[2])


def test_computing_what_a_hub_does_not_have(capsys: pytest.CaptureFixture[str], empty: str) -> None:
    typed = ["pull", str(MODEL), "--hub", empty, "--device", "cpu", "--dry-run", "--no-lock"]
    again = proposed(refused(capsys, 3, *typed))
    assert {*typed, "--compute"} == {*again} and run(again) == 0
    assert "Would compute one" in capsys.readouterr().out


def test_serving_what_a_hub_does_not_have(capsys: pytest.CaptureFixture[str], empty: str) -> None:
    typed = ["serve", TINY, "--model", str(MODEL), "--hub", empty, "--print", "--device", "cpu"]
    again = proposed(refused(capsys, 3, *typed, "--port", "4000"))
    assert {*typed, "--port", "4000", "--compute"} == {*again}


def test_a_model_that_is_on_no_hub(
    capsys: pytest.CaptureFixture[str], hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OSCAR_ZOO_PORT")
    for typed in (
        ["serve", TINY, "--hub", hub, "--print"],
        ["eval", TINY, "--hub", hub, "--task", "recall", "--answers", "3"],
    ):
        assert {*typed, "--model", "FOLDER"} == {*proposed(refused(capsys, 2, *typed))}


def test_a_model_on_no_hub_for_commands_that_start_servers(
    capsys: pytest.CaptureFixture[str], hub: str
) -> None:
    common, flags = [TINY, "--hub", hub], ["--", "--mem-fraction-static=0.5"]
    for typed, rest in (
        (["eval", *common, "--engine", "sglang", "--chunk", "64,128", "--csv", "a b.csv"], flags),
        (["eval", *common, "--task", "sample", "--limit", "3"], flags),
        (["bench", "serve", *common, "--batch", "1"], flags),
        (["bench", "load", *common, "--clients", "2"], []),
    ):
        assert run([*typed, *rest]) == 2
        line = capsys.readouterr().err
        assert sorted(proposed(line)) == sorted([*typed, "--model", "FOLDER", *rest]), line


@pytest.mark.parametrize("name", [TINY, f"oscar-zoo/{TINY}"])
def test_a_model_on_no_hub_that_was_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """`--model` takes its folder; nothing is started, loaded or looked up before that is said."""
    artifact = str(write_folder(tmp_path / "rotation", artifact_files()))
    cause = f"the checkpoint of {TINY} is on no hub. Give its folder: oscar-zoo "
    for command in (
        ["serve", artifact, "--device", "cpu"],
        ["serve", artifact, "--print"],
        ["serve", TINY, "--compute", "--device", "cpu"],
        ["eval", artifact, "--task", "recall"],
        ["eval", artifact, "--against", "fp8"],
        ["eval", artifact, "--engine", "sglang"],
        ["eval", artifact, "--task", "sample"],
        ["ruler", artifact],
        ["bench", "serve", artifact, "--batch", "1"],
        ["bench", "load", artifact, "--clients", "2"],
    ):
        line = refused(capsys, 2, *command, "--model", name)
        assert cause in line and {*command, "--model", "FOLDER"} <= {*proposed(line)}, line
        assert name not in proposed(line) or name in command
    line = refused(capsys, 2, "eval", artifact, f"--model={name}", "--engine", "sglang")
    assert proposed(line) == ["eval", artifact, "--model", "FOLDER", "--engine", "sglang"]
    assert run(["verify", artifact, "--model", name]) == 0  # its shapes are in the zoo


def test_names_are_listed_where_they_were_looked_for(
    capsys: pytest.CaptureFixture[str], hub: str, empty: str
) -> None:
    for hubs in ([hub], [hub, empty]):
        options = [word for name in hubs for word in ("--hub", name)]
        line = refused(capsys, 3, "pull", "nobody-knows-this", *options)
        again = line.partition("oscar-zoo ")[2].partition(";")[0]
        assert shlex.split(again) == ["list", *options] and run(shlex.split(again)) == 0
        assert TAG in capsys.readouterr().out


def test_a_damaged_copy_is_fetched_from_its_hub(
    capsys: pytest.CaptureFixture[str], hub: str
) -> None:
    assert run(["pull", TINY, "--hub", hub]) == 0
    entry = next(Path(os.environ["OSCAR_ZOO_CACHE"]).rglob(f"artifacts/*/*/{K_NAME}"))
    entry.unlink()
    capsys.readouterr()
    assert run(["verify", TINY]) == 4
    again = proposed(capsys.readouterr().err)
    assert again == ["pull", f"{TINY}:{TAG}", "--hub", hub] and run(again) == 0
    assert run(["verify", TINY]) == 0
