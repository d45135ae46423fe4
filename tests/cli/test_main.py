"""The command group: exit codes, help and its examples, other words, bugs, signals, streams that
are closed or full, and what shells complete."""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from cli_output import TINY, Cli, parsed
from hub_uses import publish
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo import errors, paths
from oscar_zoo.artifact.names import ArtifactId, Reference, is_path, parse_digest
from oscar_zoo.cli import main
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.hubs.remote import MetadataCache, kept_name
from oscar_zoo.registry.store import Store

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


def test_a_bug_is_one_line_that_leads_to_more(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the first line\nthe second")

    monkeypatch.setattr("oscar_zoo.site.info.describe", broken)
    line = cli.refused(1, "info", TINY)
    assert "RuntimeError: the first line" in line and "OSCAR_ZOO_DEBUG=1" in line
    monkeypatch.setenv("OSCAR_ZOO_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main.run(["info", TINY])


def test_sigterm_is_told_and_other_exits_pass(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_unwritable_output_is_an_error(words: str, code: int, seen: str, unbuffered: str) -> None:
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
    assert main.run(["completion", "bash"]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_their_commands_and_options(tmp_path: Path, script: str) -> None:
    for words, found in (
        ("pu", ["pull", "publish"]),
        ("models --so", ["--sort"]),
        ("run --de", []),
        ("cache v", ["verify"]),
        ("cache gc --d", ["--dry-run"]),
        ("completion z", ["zsh"]),
        ("nonsense x", []),
    ):
        assert completed(tmp_path, script, "oscar-zoo", *words.split()) == found, words
    for words in ("", "help "):
        found = completed(tmp_path, script, *f"oscar-zoo {words}".split(), "")
        assert set(found) == set(main.COMMANDS)


def offered(*words: str) -> list[str]:
    """What the program answers to bash for the last of `words`, `type,value` each."""
    asked = {
        "_OSCAR_ZOO_COMPLETE": "bash_complete",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "oscar_zoo"], capture_output=True, text=True, env=os.environ | asked
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_names_of_models_and_versions(tmp_path: Path, script: str) -> None:
    """From the package, the store and hubs in folders; the shell breaks words at colons."""
    Store().put(ArtifactId("Mine", "one"), artifact_files(artifact="Mine/one"), source="test")
    hub = LocalHub(paths.default_zoo_dir(), must_exist=False)
    publish(write_folder(tmp_path / "a", artifact_files()), hub, aliases=("small",))
    for command in ("pull", "serve", "search"):
        found = completed(tmp_path, script, "oscar-zoo", command, "")
        assert {"Mine", "small", "tiny-qwen3-hard", "Qwen3-8B", "Qwen3-4B-Thinking"} <= {*found}
    tag = "seq512_prompt2_group64"
    for words, want in (
        (("pull", "mine", "SMA"), ["small"]),
        (("pull", "tiny-qwen3-hard", ":", "seq5"), [tag]),
        (("info", "tiny-qwen3-hard", ":"), [tag]),
        (("info", "tiny-qwen3-hard/"), [f"tiny-qwen3-hard/{tag}"]),
        (("yank", "tiny"), [f"tiny-qwen3-hard:{tag}"]),
        (("deprecate", "Mi"), ["Mine:one"]),
        (("cache", "rm", ""), ["Mine"]),
        (("verify", ""), ["Mine"]),
        (("compute", "qwen3.5-35"), ["Qwen3.5-35B-A3B"]),
        (("eval", "Mine", "--model", "Qwen/Qwen3-32"), ["Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8"]),
        (("compare", "Mine", "tiny-qwen3-h"), ["tiny-qwen3-hard"]),
        (("leaderboard", "--task", "aime"), ["aime24", "aime25"]),
        (("list", "--sort", "p"), ["perplexity"]),
        (("list", "--family", "gem"), ["Gemma-3", "Gemma-4"]),
    ):
        assert completed(tmp_path, script, "oscar-zoo", *words) == want, words


@pytest.mark.parametrize(
    ("command", "word"),
    [("pull", "./"), ("serve", "../x"), ("eval", "/a"), ("verify", "~/b"), ("compute", "./c")],
)
def test_paths_are_left_to_the_shell(command: str, word: str) -> None:
    assert offered("oscar-zoo", command, word) == [f"file,{word}"]


def test_the_index_of_a_hub_that_was_asked_before_is_known(tmp_path: Path) -> None:
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    publish(write_folder(tmp_path / "a", artifact_files()), hub, aliases=("far-away",))
    index = (tmp_path / "hub/index.json").read_bytes()
    MetadataCache("hf:someone/zoo").once("0" * 40, kept_name("index.json"), lambda: index)
    assert offered("oscar-zoo", "pull", "far") == ["plain,far-away"]


def test_completing_a_name_loads_nothing_heavy_and_asks_nobody(tmp_path: Path) -> None:
    code = (
        "import os, socket, sys\n"
        "socket.socket.connect = None\n"
        "from oscar_zoo.cli.main import run\n"
        "try:\n    run([])\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch', 'transformers', 'huggingface_hub', 'modelscope_hub', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    asked = {
        "_OSCAR_ZOO_COMPLETE": "bash_complete",
        "COMP_WORDS": "oscar-zoo\npull\nQwen3-8",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked
    )
    assert (done.stdout, done.stderr) == ("plain,Qwen3-8B\n", "[]\n")


def test_what_cannot_be_read_is_left_out(own_state: Path) -> None:
    (own_state / "config").mkdir()
    (own_state / "config/config.toml").write_text("broken [")
    (own_state / "cache").mkdir(mode=0o777)
    (own_state / "cache").chmod(0o777)
    assert offered("oscar-zoo", "pull", "Qwen3-8") == ["plain,Qwen3-8B"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_take_their_scripts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str
) -> None:
    assert main.run(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "_OSCAR_ZOO_COMPLETE" in text and f"{shell}_complete" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script was printed, not read")
    (tmp_path / "script").write_text(text)
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
