"""The command group: exit codes, one-line errors, help that needs no heavy library."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_output import parsed

from oscar_zoo import errors
from oscar_zoo.cli import main

HEAVY = (
    "torch",
    "transformers",
    "sglang",
    "triton",
    "huggingface_hub",
    "modelscope_hub",
    "numpy",
    "pydantic",
)


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from oscar_zoo.cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | (env or {}),
    )


def test_every_error_class_has_the_exit_code_of_its_branch() -> None:
    branches = {
        errors.UsageError: 2,
        errors.NotFoundError: 3,
        errors.IntegrityError: 4,
        errors.NetworkError: 5,
        errors.AccessError: 6,
        errors.ConflictError: 7,
        errors.StorageError: 8,
    }
    classes = [
        c
        for _, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, errors.OscarZooError)
    ]
    assert len(classes) > 20
    for kind in classes:
        made = kind("reason", "text") if issubclass(kind, errors.MalformedFile) else kind("text")
        want = next((code for branch, code in branches.items() if issubclass(kind, branch)), 1)
        assert main.exit_code(made) == want, kind
    assert main.exit_code(KeyboardInterrupt()) == 130


def test_error_codes_are_unique_and_extend_their_branch() -> None:
    classes = [
        c
        for _, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, errors.OscarZooError)
    ]
    codes = [c.code for c in classes]
    assert len(set(codes)) == len(codes)


HELP = f"""
import contextlib, io, json, sys
from oscar_zoo.cli.main import COMMANDS, run
told = {{}}
for command in ("", *COMMANDS):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = run([command, "--help"] if command else ["--help"])
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    told[command] = [status, loaded, out.getvalue()]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, Any]:
    """Of every command, in one fresh process: the exit code of `--help`, the heavy libraries that
    were loaded by then, and the text."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("command", ["", *main.COMMANDS])
def test_help_imports_no_heavy_library(helps: dict[str, Any], command: str) -> None:
    """Nor does that of any command before it."""
    status, loaded, text = helps[command]
    assert (status, loaded) == (0, [])
    assert "Usage: oscar-zoo" in text


@pytest.mark.parametrize("command", list(main.COMMANDS))
def test_help_of_every_command_has_examples(helps: dict[str, Any], command: str) -> None:
    text = helps[command][2]
    assert "Examples:" in text
    assert text.count(f"  oscar-zoo {command}") >= 1


def test_an_error_is_one_line_on_stderr_with_cause_and_next_step() -> None:
    done = run("info", "qwen3-7b")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert (
        done.stderr.startswith("error: ")
        and "'qwen3-7b'" in done.stderr
        and "Qwen3-8B" in done.stderr
    )


def test_an_error_with_json_is_one_object_on_stdout() -> None:
    done = run("info", "qwen3-7b", "--json")
    assert done.returncode == 3
    assert done.stderr == ""
    error = parsed(done.stdout)["error"]
    assert (
        error["code"] == "not_found.artifact"
        and "qwen3-7b" in error["message"]
        and "Qwen3-8B" in error["hint"]
    )


def test_a_wrong_command_is_a_usage_error_with_a_suggestion() -> None:
    done = run("pul", "Qwen3-8B")
    assert done.returncode == 2
    assert "did you mean pull" in done.stderr.lower()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("typed", "meant"), [("hlep", "help"), ("modles", "models"), ("ftt", "fit")]
)
def test_a_slip_in_any_word_is_found(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([typed]) == 2
    assert f"Did you mean {meant}?" in capsys.readouterr().err


def test_every_command_is_in_one_group_of_the_help(helps: dict[str, Any]) -> None:
    assert sum(map(len, main.GROUPS.values())) == len(main.COMMANDS)
    text = helps[""][2]
    for title, group in main.GROUPS.items():
        block = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\S+)", block, re.MULTILINE) == list(group)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit code and the outputs of a command line."""
    return main.run(words), *capsys.readouterr()


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("help", "--help"),
        ("help pull", "pull --help"),
        ("help help", "--help"),
        ("help cache gc", "cache gc --help"),
        ("help rm", "cache rm --help"),
        ("version", "--version"),
        ("show qwen3-7b --json", "info qwen3-7b --json"),
        ("show Qwen3-8B --offline --json", "info Qwen3-8B --offline --json"),
        ("ls --offline --json", "list --offline --json"),
        ("models --offline --nonsense", "list --offline --nonsense"),
        ("rm Nothing", "cache rm Nothing"),
        ("push ./nowhere", "publish ./nowhere"),
    ],
)
def test_words_of_other_programs(typed: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, *typed.split()) == shown(capsys, *ours.split())


def test_other_words_are_told_once_and_name_commands(helps: dict[str, Any]) -> None:
    line = " ".join(helps[""][2].partition("Other words: ")[2].split())
    for word, ours in main.OTHER_WORDS.items():
        assert word not in main.COMMANDS
        assert not ours or (ours[0] in (*main.COMMANDS, "--help", "--version") and word in line)


@pytest.mark.parametrize(
    ("typed", "serve", "chat"),
    [
        (["Qwen3-8B"], "serve Qwen3-8B --detach", "chat Qwen3-8B"),
        (["./a b", "--port", "1"], "serve './a b' --detach --port 1", "chat"),
        (
            ["Qwen3-8B", "Why so?", "--", "--tp=2"],
            "serve Qwen3-8B --detach -- --tp=2",
            "chat Qwen3-8B 'Why so?'",
        ),
        ([], "serve NAME --detach", "chat"),
    ],
)
def test_run_is_two_commands(
    typed: list[str], serve: str, chat: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = shown(capsys, "run", *typed)
    told = f"oscar-zoo {serve} && oscar-zoo {chat}\n"
    assert code == 2 and error.endswith(told)


def test_a_wrong_option_names_the_help_of_its_command() -> None:
    done = run("pull", "--nonsense")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "oscar-zoo pull --help" in done.stderr


def test_debug_shows_the_traceback() -> None:
    done = run("info", "qwen3-7b", env={"OSCAR_ZOO_DEBUG": "1"})
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_control_and_bidi_characters_never_reach_the_terminal(tmp_path: Path) -> None:
    done = run("verify", str(tmp_path / "a\x1b[31m\u202eb"))
    assert done.returncode == 3
    assert "\x1b" not in done.stderr and "\u202e" not in done.stderr


def test_a_closed_pipe_is_no_traceback() -> None:
    script = f"{sys.executable} -c 'from oscar_zoo.cli.main import main; main()' list | head -c 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_the_version_has_a_short_option() -> None:
    long, short = run("--version"), run("-V")
    assert (short.returncode, short.stdout) == (0, long.stdout) and short.stdout.startswith(
        "oscar-zoo "
    )
