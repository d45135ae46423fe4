"""The command group: exit codes, help and its examples, other words, bugs, signals, and streams
that are closed or full."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from cli_output import TINY, Cli, parsed

import oscar_zoo.site.scores  # noqa: F401 (it would keep what the tests put in place of describe)
from oscar_zoo import errors
from oscar_zoo.artifact.names import Reference, is_path, parse_digest
from oscar_zoo.cli import main

HEAVY = "torch transformers sglang triton huggingface_hub modelscope_hub numpy pydantic".split()
PROGRAM = (sys.executable, "-c", "from oscar_zoo.cli.main import main; main()")
NAMED = "artifact first second name names targets replaced_by dummy_weights".split()
"""Parameters that take names of artifacts, some of them paths too."""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | variables
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, env=env)


def test_every_error_class_has_a_code_and_the_exit_code_of_its_branch() -> None:
    kinds = [x for _, x in inspect.getmembers(errors, inspect.isclass)]
    classes = [kind for kind in kinds if issubclass(kind, errors.OscarZooError)]
    assert len({kind.code for kind in classes}) == len(classes) > 20
    branches = ("Usage", "NotFound", "Integrity", "Network", "Access", "Conflict", "Storage")
    wanted = {getattr(errors, f"{name}Error"): code for code, name in enumerate(branches, 2)}
    for kind in classes:
        made = kind("reason", "text") if issubclass(kind, errors.MalformedFile) else kind("text")
        want = next((code for branch, code in wanted.items() if issubclass(kind, branch)), 1)
        assert main.exit_code(made) == want, kind
    assert main.exit_code(KeyboardInterrupt()) == 130


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
def helps() -> dict[str, str]:
    """The help of every command, in one fresh process, which loads no heavy library for it."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, Any] = json.loads(done.stdout)
    assert {(status, *loaded) for status, loaded, _ in told.values()} == {(0,)}
    return {command: text for command, (_, _, text) in told.items()}


def test_the_help_of_the_group_is_whole(helps: dict[str, str]) -> None:
    text = " ".join(helps[""].split())
    codes, words = text.partition("Exit codes: ")[2], text.partition("Other words: ")[2]
    for code in {code for _, code in main.EXIT_CODES} | {0, 130, 141, 143}:
        assert f"{code} " in codes
    for word, ours in main.OTHER_WORDS.items():
        assert word not in main.COMMANDS and (not ours or word in words)
    for title, group in main.GROUPS.items():
        block = helps[""].partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\S+)", block, re.MULTILINE) == list(group)


def every_command() -> list[tuple[str, ...]]:
    """The words of every command and of every command of a group."""
    context = click.Context(main.cli)
    found: list[tuple[str, ...]] = [()]
    for name in main.COMMANDS:
        inner = getattr(main.cli.get_command(context, name), "commands", {})
        found += [(name,), *((name, one) for one in inner)]
    return found


def parse(arguments: list[str]) -> click.Context:
    """The innermost context of a command line, from click's own parser."""
    command: click.Command = main.cli
    context = main.cli.make_context("oscar-zoo", [*arguments])
    while isinstance(command, click.Group):
        words = [*context._protected_args, *context.args]
        name, found, rest = command.resolve_command(context, words)
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    return context


@pytest.mark.parametrize("words", every_command(), ids=lambda words: " ".join(words) or "oscar-zoo")
def test_every_example_parses(words: tuple[str, ...], cli: Cli) -> None:
    block = cli(0, *words, "--help").partition("  Examples:\n")[2].partition("\n\n")[0]
    lines = [line.strip() for line in re.sub(r" \\\n\s+", " ", block).splitlines()]
    assert len(lines) >= 2
    assert any(line.startswith(" ".join(("oscar-zoo", *words))) for line in lines)
    for line in (line.rpartition(" | ")[2] for line in lines):
        if not line.startswith("oscar-zoo "):
            assert "$(oscar-zoo " in line, line
            continue
        context = parse(shlex.split(line.partition(" > ")[0])[1:])
        for parameter, value in context.params.items():
            given = value if isinstance(value, tuple) else (value,)
            for text in given if parameter in NAMED else ():
                flag = text is None or text.startswith("-")  # of an engine, behind the --
                assert flag or is_path(text) or Reference.parse(text), line
            if parameter == "digest" and value is not None:
                parse_digest(value)


@pytest.mark.parametrize(
    "line", ["pull --nonsense", "eval", "bench nothing", "list --hub", "serve X --port many"]
)
def test_a_wrong_example_is_found(line: str) -> None:
    with pytest.raises((click.UsageError, ValueError)):
        parse(line.split())


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("help", "--help"),
        ("help pull", "pull --help"),
        ("help help", "--help"),
        ("help cache gc", "cache gc --help"),
        ("help rm", "cache rm --help"),
        ("version", "--version"),
        ("-V", "--version"),
        ("show qwen3-7b --json", "info qwen3-7b --json"),
        ("show Qwen3-8B --offline --json", "info Qwen3-8B --offline --json"),
        ("ls --offline --json", "list --offline --json"),
        ("models --offline --nonsense", "list --offline --nonsense"),
        ("rm Nothing", "cache rm Nothing"),
        ("push ./nowhere", "publish ./nowhere"),
    ],
)
def test_words_of_other_programs(typed: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ((main.run(line.split()), *capsys.readouterr()) for line in (typed, ours))
    assert first == second


@pytest.mark.parametrize(
    ("typed", "serve", "chat"),
    [
        (["Qwen3-8B"], "serve Qwen3-8B --detach", "chat Qwen3-8B"),
        (["./a b", "--port", "1"], "serve './a b' --detach --port 1", "chat"),
        (["X", "Why so?", "--", "--tp=2"], "serve X --detach -- --tp=2", "chat X 'Why so?'"),
        ([], "serve NAME --detach", "chat"),
    ],
)
def test_run_is_two_commands(typed: list[str], serve: str, chat: str, cli: Cli) -> None:
    assert cli.refused(2, "run", *typed).endswith(f"oscar-zoo {serve} && oscar-zoo {chat}\n")


def test_no_command_prints_the_help(cli: Cli) -> None:
    assert cli(2) == "" and cli.err.startswith("Usage: oscar-zoo")
    assert all(name in cli.err for name in main.COMMANDS)


def test_an_error_of_a_fresh_process(tmp_path: Path) -> None:
    """One line or one object, and nothing of a path that a terminal would act on."""
    line, facts = run("info", "qwen3-7b"), run("info", "qwen3-7b", "--json")
    assert (line.returncode, line.stdout, line.stderr.count("\n")) == (3, "", 1)
    error = parsed(facts.stdout)["error"]
    assert (facts.returncode, facts.stderr, error["code"]) == (3, "", "not_found.artifact")
    assert "qwen3-7b" in error["message"] and "Qwen3-8B" in error["hint"]
    assert "Traceback" in run("info", "qwen3-7b", OSCAR_ZOO_DEBUG="1").stderr
    odd = run("verify", str(tmp_path / "a\x1b[31m\u202eb"))
    assert odd.returncode == 3 and not {"\x1b", "\u202e"} & {*odd.stderr}


def test_a_bug_is_one_line_that_says_how_to_see_more(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the first line\nthe second")

    monkeypatch.setattr("oscar_zoo.site.info.describe", broken)
    line = cli.refused(1, "info", TINY)
    assert "RuntimeError: the first line" in line and "OSCAR_ZOO_DEBUG=1" in line
    monkeypatch.setenv("OSCAR_ZOO_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main.run(["info", TINY])


def test_sigterm_is_reported_and_other_exits_pass(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscar_zoo.site.info.describe", lambda *_, **__: sys.exit(main.TERMINATED))
    assert "SIGTERM" in cli.refused(143, "info", TINY)
    monkeypatch.setattr("oscar_zoo.site.info.describe", lambda *_, **__: sys.exit(5))
    with pytest.raises(SystemExit):
        main.run(["info", TINY])


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "code", "seen"),
    [
        ("list", 8, "error: no space left"),
        ("list --json", 8, "error: no space left"),
        ("info Qwen3-9B --json", 3, "error: no artifact is called"),
    ],
)
def test_output_that_cannot_be_written_is_an_error(
    words: str, code: int, seen: str, unbuffered: str
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        command = [*PROGRAM, *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, text=True)
    assert done.returncode == code and done.stderr.startswith(seen) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("list >&-", 0),
        ("list 2>&-", 0),
        ("list >&- 2>&-", 0),
        ("list --json >&-", 0),
        ("list --json >/dev/full", 8),
        ("chat <&-", 3),
        ("list | head -c 1", 0),
    ],
)
def test_closed_and_full_streams_are_no_tracebacks(words: str, code: int) -> None:
    line = f"{shlex.join(PROGRAM)} {words}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "internal" not in done.stderr, done.stderr
    assert done.returncode == code


def test_results_and_notes_in_one_file_keep_their_order() -> None:
    program = (
        "from oscar_zoo.cli.render.terminal import note, prose; prose('1'); note('2'); prose('3')"
    )
    command = [sys.executable, "-c", program]
    both = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert both.stdout.split() == ["1", "2", "3"]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_goes_ends_it_as_sigpipe_would(more: list[str]) -> None:
    """As in `oscar-zoo list | head -1`: quietly, and with the exit code of other tools."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([*PROGRAM, "list", *more], stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_HUB_ETAG_TIMEOUT", "x"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "1.5"),
        ("HF_ENDPOINT", "http://[::1"),
    ],
)
def test_a_setting_that_the_hub_s_client_cannot_read_is_named(name: str, value: str) -> None:
    env = {x: y for x, y in os.environ.items() if not x.startswith("HF_")} | {name: value}
    words = [*PROGRAM, "pull", "Qwen3-8B", "--hub", "hf:a/b", "--json"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (5, "network.environment")
    assert name in error["message"] and value not in error["message"]
