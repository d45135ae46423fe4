"""Narrow terminals and poor encodings: lines break between words, and no character is an error."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_output import Cli, parsed
from hub_uses import HARD
from measured_artifacts import measured_files
from terminal import Terminal
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import COMMANDS
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.streams import ascii_text
from oscar_zoo.registry.store import Store
from oscar_zoo.serving.servers import serve_log

PROGRAM = [sys.executable, "-m", "oscar_zoo"]
EACH = """
import json, os, sys
from oscar_zoo.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = [os.fsdecode(word.encode()) for word in words]
    try:
        main()
    except SystemExit as end:
        print(end.code, end="\\0", flush=True)
        print(end="\\0", file=sys.stderr, flush=True)
"""
"""Runs commands one after the other. Behind each it writes a zero to both streams, and before that
of stdout the exit code."""


def on_a_terminal(columns: int, *words: str) -> str:
    """What a command shows on a terminal of so many columns, without colours."""
    return shown_on_a_terminal(columns, [*PROGRAM[1:], *words])


def shown_on_a_terminal(columns: int, command: list[str], *, stderr: bool = False) -> str:
    """What a program writes to stdout, or to stderr, where that is a terminal."""
    variables = os.environ | {"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    if stderr:  # rich gives a dumb terminal 80 columns
        variables["TERM"] = "xterm"
    shown, other = ("stderr", "stdout") if stderr else ("stdout", "stderr")
    with Terminal(command, variables, [shown], **{other: subprocess.PIPE}) as seen:
        assert seen.end() == 0, seen.child.stderr and seen.child.stderr.read()
    return seen.text.replace("\r\n", "\n").replace("\r", "")


def help_at(columns: int, words: tuple[str, ...], cli: Cli, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("COLUMNS", str(columns))
    return cli(0, *words, "--help")


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_help_breaks_between_words(columns: int, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every command; examples go on behind a backslash, as one command of a shell."""
    for name in COMMANDS:
        wide, text = (help_at(n, (name,), cli, monkeypatch) for n in (400, columns))
        for line in text.splitlines():
            words = line.removesuffix(" \\").split()
            unbreakable = len(words) == 1 or (words and words[0].startswith("-"))
            assert len(line) <= min(columns, 100) or unbreakable, line
        assert [word for word in text.split() if word != "\\"] == wide.split()
        shown = [one.partition("Examples:\n")[2].partition("\n\n")[0] for one in (text, wide)]
        lines = [one.replace("\\\n", "").splitlines() for one in shown]
        assert [*map(shlex.split, lines[0])] == [*map(shlex.split, lines[1])]


@pytest.mark.parametrize("columns", [50, 60, 80])
def test_a_table_that_does_not_fit_becomes_a_block_per_row(columns: int) -> None:
    shown = on_a_terminal(columns, "list", "--offline")
    wide = on_a_terminal(200, "list", "--offline")
    assert max(map(len, shown.splitlines())) <= columns
    assert {"GLM-4.7-FP8", "seq10000_prompt43_group128"} <= {*shown.split()} <= {*wide.split(), "-"}
    assert max(map(len, wide.splitlines())) > 80


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_a_list_keeps_what_was_measured(columns: int) -> None:
    """Columns without any value go first, and blocks of lines have room for all."""
    record = Store().put(HARD, measured_files(), source="file:/zoo").record
    shown = on_a_terminal(columns, "list", "--installed")
    for part in (HARD.model, HARD.tag, "PERPLEXITY", "+0.90 %", "RECALL", "99.2 → 98.4 %"):
        assert part in shown, part
    assert "FMT" in shown and "BITS" in shown and ("GPQA" in shown) == (columns >= 120)
    assert "measured by oscar-zoo on held-out text" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= columns
    if columns <= 80:
        assert str(record.path) in on_a_terminal(columns, "cache", "list")


def test_a_list_spares_what_says_least_before_it_becomes_blocks() -> None:
    Store().put(HARD, measured_files(), source="file:/zoo")
    wide, narrow = (on_a_terminal(columns, "list", "--offline") for columns in (200, 90))
    assert {"FMT", "PERPLEXITY", "GPQA"} <= {*wide.split()}
    assert narrow.split()[:2] == ["MODEL", "TAG"] and "56.67 → 55.56" in narrow
    assert not {"FMT", "+0.90"} & {*narrow.split()} and "held-out" not in narrow
    assert "PERPLEXITY and RECALL do not fit this terminal" in narrow and "not fit" not in wide


def test_a_comparison_has_numbers_for_names_that_do_not_fit() -> None:
    words = ("compare", "Qwen3-8B", "Qwen3-32B", "--offline")
    wide, narrow = on_a_terminal(200, *words), on_a_terminal(80, *words)
    first = "Qwen3-8B:seq20000_prompt83_group128"
    assert wide.startswith(" ") and narrow.startswith(f"1  {first}\n2  Qwen3-32B:")
    assert max(map(len, narrow.splitlines())) <= 80 and narrow.count(first) == 1
    assert len(narrow.splitlines()) == len(wide.splitlines()) + 2


def test_what_is_not_a_terminal_gets_every_row_in_one_line() -> None:
    env = os.environ | {"COLUMNS": "30"}
    words = [*PROGRAM, "list", "--offline"]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    rows = [line for line in done.stdout.splitlines() if "GLM-4.7-FP8" in line]
    assert any("seq10000_prompt43_group128" in row for row in rows)


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["latin-1", "ascii", "C"],
)
def test_a_poor_encoding_gets_other_characters(variables: dict[str, str], tmp_path: Path) -> None:
    write_folder(tmp_path / "größe→", artifact_files())
    place = f"{tmp_path}/größe→"
    commands = (
        ["list", "--offline"],
        ["info", "Qwen3-8B", "--offline"],
        ["verify", place],
        ["verify", f"{place}/x"],
    )
    lines = [[*words, *more] for words in commands for more in ([], ["--json"])]
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(lines)],
        capture_output=True,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr
    both = [stream.split(b"\0")[:-1] for stream in (done.stdout, done.stderr)]
    ended = dict(zip(map(tuple, lines), zip(*both, strict=True), strict=True))
    for words, (out, err) in ended.items():
        out, code = out[:-1], out[-1]
        shown = (out + err).decode("latin-1")
        assert code == ord("3" if f"{place}/x" in words else "0"), shown
        assert "internal" not in shown and "Traceback" not in shown
        if "--json" in words:
            parsed(out.decode("ascii" if "latin-1" not in variables.values() else "latin-1"))
    assert b"56.67 -> 55.56 u" in ended["list", "--offline"][0]


def test_json_keeps_what_cannot_be_encoded() -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*PROGRAM, "verify", "./→", "--json"], capture_output=True, env=env)
    assert parsed(done.stdout)["error"]["message"].endswith("./→") and b"\\u2192" in done.stdout


@pytest.mark.parametrize("hidden", ["\x1b[1m", "\x7f", "\x9b1m", "\u202e", "\u2066", "\U000e0041"])
def test_json_shows_what_terminals_act_on(hidden: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.emit_json({"note": f"é{hidden}x", "é": [hidden]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"note": f"é{hidden}x", "é": [hidden]}
    assert out.isprintable() or out.replace("\n", "").isprintable()
    assert "é" in out


def test_characters_without_an_equivalent_are_question_marks() -> None:
    assert ascii_text("a → b ↓ … “c” größe ᵘ ═ 漢") == 'a -> b v ... "c" gro?e u ? ?'


def test_lines_of_facts_break_below_their_text(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny-qwen3-hard" / "seq512_prompt2_group64", artifact_files())
    words = [("info", "Qwen3-8B", "--offline"), ("doctor", "--offline"), ("verify", str(folder))]
    for command in words:
        wide, narrow = on_a_terminal(4000, *command), on_a_terminal(60, *command)
        for line in narrow.splitlines():
            # a path or a digest is there to be copied, so it is never broken
            assert len(line) <= 60 or max(map(len, line.split())) > 30, line
        assert len(narrow.splitlines()) > len(wide.splitlines())
        if command[0] != "doctor":  # it measures how long hubs take and how much room is left
            assert narrow.split() == wide.split()


def test_a_terminal_gets_the_end_of_a_log() -> None:
    serve_log(30001).write_text("".join(f"line {number}\n" for number in range(250)))
    shown = on_a_terminal(80, "logs", "30001").splitlines()
    assert (len(shown), shown[0], shown[-1]) == (100, "line 150", "line 249")
    assert on_a_terminal(80, "logs", "30001", "--lines", "all").count("line ") == 250


def test_a_table_for_a_log_keeps_its_columns(tmp_path: Path) -> None:
    """stderr without a terminal has no width that rows have to be cut to."""
    names = [f"A COLUMN {number}" for number in range(20)]
    program = (
        "import json, sys; from oscar_zoo.cli.render import terminal;"
        " names = json.loads(sys.argv[1]); table = terminal.table(*names);"
        " table.add_row(*names); terminal.err().print(table)"
    )
    log = tmp_path / "err.log"
    with log.open("wb") as stream:
        subprocess.run(
            [sys.executable, "-c", program, json.dumps(names)],
            stderr=stream,
            env=os.environ | {"COLUMNS": "60", "NO_COLOR": "1"},
            check=True,
        )
    assert [line.split("  ") for line in log.read_text().splitlines()] == [names, names]


CHOICE = """
from oscar_zoo.cli.render import terminal
heads = ["METHOD", "K CLIP", "V CLIP", "OUTPUT ERROR", "TEXT", "KL", "PERPLEXITY", "vs BF16"]
table = terminal.table(*heads, "± SE", "RECALL", "", right=tuple(range(1, 10)))
table.add_row("BF16", *[""] * 5, "12.345", *[""] * 4)
table.add_row("oscar-per-head", "0.96", "0.881", "0.0123", "64/64", "0.012", "12.345", "+0.28 %",
              "0.02", "98.6%", "kept")
from rich.progress import Progress
if DRAWS:
    bars = Progress(console=terminal.err())
    bars.start()
    bars.console.print(table)
    bars.stop()
else:
    terminal.err().print(table)
"""


@pytest.mark.parametrize("draws", [False, True], ids=["plain", "beside bars"])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_table_on_stderr_is_never_cut(columns: int, draws: bool) -> None:
    program = CHOICE.replace("DRAWS", str(draws))
    lines = shown_on_a_terminal(columns, ["-c", program], stderr=True).splitlines()
    assert "…" not in "".join(lines) and max(map(len, lines)) <= columns
    words = "oscar-per-head 0.96 0.881 0.0123 64/64 0.012 12.345 +0.28 % 0.02 98.6% kept".split()
    if columns == 200:
        assert words in [line.split() for line in lines]
    else:
        (start,) = [n for n, line in enumerate(lines) if line.startswith("oscar-per-head")]
        assert set(words) < set(" ".join(lines[start:]).split())
        assert "  PERPLEXITY    12.345" in lines and "-" not in " ".join(lines[:start]).split()
