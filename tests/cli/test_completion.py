"""`oscar-zoo completion`: scripts that real shells take, and what they complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oscar_zoo.cli.main import COMMANDS, run


def completed(folder: Path, script: str, *words: str) -> list[str]:
    """What bash offers for the last of `words` once it has read `script`."""
    program = folder / "oscar-zoo"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m oscar_zoo "$@"\n')
    program.chmod(0o755)
    line = " ".join(f"'{word}'" for word in words)
    state = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    show = "_oscar_zoo_completion oscar-zoo; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{state}; {show}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["completion", "bash"]) == 0
    return capsys.readouterr().out


def test_bash_takes_the_script(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_commands_their_commands_and_options(tmp_path: Path, script: str) -> None:
    assert completed(tmp_path, script, "oscar-zoo", "pu") == ["pull", "publish"]
    assert set(completed(tmp_path, script, "oscar-zoo", "")) == set(COMMANDS)
    assert completed(tmp_path, script, "oscar-zoo", "cache", "v") == ["verify"]
    assert completed(tmp_path, script, "oscar-zoo", "cache", "gc", "--d") == ["--dry-run"]
    assert completed(tmp_path, script, "oscar-zoo", "completion", "z") == ["zsh"]


def test_a_command_that_does_not_exist_completes_nothing_and_says_nothing(tmp_path: Path, script: str) -> None:
    assert completed(tmp_path, script, "oscar-zoo", "nonsense", "x") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_scripts(capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str) -> None:
    assert run(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "_OSCAR_ZOO_COMPLETE" in text and f"{shell}_complete" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script was printed, not read")
    (tmp_path / "script").write_text(text)
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["tcsh"]):
        assert run(["completion", *words]) == 2
        assert "oscar-zoo completion --help" in capsys.readouterr().err
