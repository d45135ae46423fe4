"""What a newcomer is told: the cause that is meant, and a step that can be taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from measured_artifacts import measured_files
from refusals import TINY, refused
from tiny_artifacts import write_folder

from oscar_zoo.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/tiny-qwen3-hard"


def test_a_hub_that_is_none_is_the_cause(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for hubs in ([f"file:{tmp_path}/no"], [f"file:{tmp_path}/no", f"file:{tmp_path}/empty"]):
        options = [word for hub in hubs for word in ("--hub", hub)]
        line = refused(capsys, 3, "pull", "Qwen3-8B", *options)
        assert f"no such folder for a hub: {tmp_path}/no" in line and "Qwen3-8B" not in line


def test_the_recipes_of_the_checkout_are_no_hub(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["pull", "Qwen3-8B"], ["list"], ["info", "Qwen3-8B"]):
        line = refused(capsys, 3, *command, "--hub", f"file:{ROOT / 'zoo'}")
        assert "the folder holds other files" in line


def test_a_folder_of_others_becomes_a_hub_only_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    artifact = write_folder(tmp_path / "artifact", measured_files())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    publish = ["publish", str(artifact), "--hub", f"file:{tmp_path / 'mine'}", "--allow-warnings"]
    assert "--create" in refused(capsys, 3, *publish)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert run([*publish, "--create"]) == 0 and run(publish) == 0
    assert run(["pull", TINY, "--hub", f"file:{tmp_path / 'mine'}"]) == 0


def test_offline_mode_is_ended_as_it_began(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_HUB_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.setenv(variable, "")
    commands = [[verb, "Qwen3-8B"] for verb in ("eval", "compute", "pull", "serve")]
    for command in commands:
        line = refused(capsys, 5, *command, "--offline")
        assert "un it without --offline" in line and "nset" not in line


def test_what_is_short_and_where_it_goes_is_said_before_the_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["compute", str(MODEL), "--method", "oscar", "--calib-tokens", "300"]) == 0
    told = capsys.readouterr().err.splitlines()
    began = next(number for number, line in enumerate(told) if line.startswith("capture"))
    for words in ("the artifact goes into", "tokens are few"):
        assert [number < began for number, line in enumerate(told) if words in line] == [True]


@pytest.mark.parametrize(
    "words", [["serve"], ["serve", "--nope"], ["fit", "./x"], ["eval", "x", "--sweep"]]
)
def test_usage_errors_end_with_the_help_to_try(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, 2, *words).endswith(f" Try: oscar-zoo {words[0]} --help\n")
