"""What a tired person gets wrong: one line, the right exit code and code, nothing half-written.

The mistakes are in `refusals.txt`, one command line each. A row that fails shows the line that
would pass, to be read before it is kept.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_output import TINY, Cli, parsed, ran
from hub_uses import hub_with
from measured_artifacts import measured_files
from random_moments import describe, random_moments
from tiny_artifacts import K_NAME, V_NAME, artifact_files, payload, write_folder

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.moments_file import save_moments

TABLE = Path(__file__).with_name("refusals.txt")
MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
ODD = os.fsdecode(b"d\xff")
"""A folder whose name is no UTF-8."""
FOREIGN = {
    "empty": b"",
    "page": b"<!DOCTYPE html><html>404</html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
    "pickle": b"\x80\x02}q\x00.",
    "picture": b"GIF89a" + b"\0" * 100,
}


class Row(NamedTuple):
    exit_code: int
    code: str
    words: str
    holds: str

    @classmethod
    def of(cls, line: str) -> Row:
        given, _, holds = line.partition("  # ")
        exit_code, code, words = given.split(maxsplit=2)
        return cls(int(exit_code), code, words, holds.strip())


ROWS = [Row.of(line) for line in TABLE.read_text().splitlines() if line[:1].isdigit()]


def make_world(root: Path) -> None:
    """Everything that the command lines name."""
    files, model = artifact_files(), root / "models"
    write_folder(root / "artifact", measured_files())
    write_folder(root / "bare", payload())
    for tag, seed in (("seq512_prompt2_group64", 0), ("seq1024_prompt4_group64", 1)):
        name = f"{TINY}/{tag}"
        write_folder(root / "hub" / name, artifact_files(artifact=name, seed=seed))
    changed = bytearray(files[K_NAME])
    changed[len(changed) // 2] ^= 1
    write_folder(root / "truncated", files | {K_NAME: files[K_NAME][:-1000]})
    write_folder(root / "flipped", files | {K_NAME: bytes(changed)})
    swapped = {"k_rotation.pt": payload()[V_NAME], "v_rotation.pt": payload()[K_NAME]}
    write_folder(root / "swapped", swapped)
    for name, layers, head_dim in (("narrow", 4, 32), ("shallow", 2, 64)):
        shape = Geometry(
            num_layers=layers,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=head_dim,
            v_head_dim=head_dim,
            attention_layers=tuple(range(layers)),
        )
        write_folder(root / name, payload(geometry=shape))
    write_folder(root / "linked", files)
    (root / "linked" / K_NAME).unlink()
    (root / "linked" / K_NAME).symlink_to(root / "artifact" / K_NAME)
    write_folder(root / "foreign", {f"{name}.pt": data for name, data in FOREIGN.items()})
    write_folder(root / "other", {"notes.txt": b"mine"})
    for folder in ("empty", "folder.pt", "captured"):
        (root / folder).mkdir()
    os.mkfifo(root / "pipe.pt")
    (root / "broken").symlink_to("nothing")
    (root / "tree").symlink_to("hub")
    (root / "loop").symlink_to("loop")
    (root / "key").write_text("secret")
    (root / "rotation.pt").write_bytes(b"x")
    (root / "broken.report.json").write_text("{}")
    (root / "truncated.report.json").write_text('{"schema":"oscar-zoo.report/1"}')
    (root / "words.txt").write_text("Once upon a time.\n" * 200)
    (root / "short.txt").write_text("one two three")
    for name in ("damaged.safetensors", "captured.moments.safetensors"):
        (root / name).write_bytes(b"\0" * 100)
    # Such a file begins with the length of its header; more of it is not read early.
    (root / "headed.safetensors").write_bytes((92).to_bytes(8, "little") + b"\0" * 92)
    moments = random_moments()
    save_moments(root / "moments.safetensors", moments, describe(moments))
    content = bytearray((root / "moments.safetensors").read_bytes())
    content[-1000] ^= 1
    (root / "flipped.safetensors").write_bytes(content)
    config = json.loads((MODEL / "config.json").read_bytes())
    for name, data in {
        "unnamed": b"{bad",
        "list": b"[]",
        "awq": json.dumps(config | {"quantization_config": {"quant_method": "awq"}}).encode(),
        "words": json.dumps(config | {"num_hidden_layers": "four"}).encode(),
    }.items():
        shutil.copytree(MODEL, model / name)
        (model / name / "config.json").write_bytes(data)
    shutil.copytree(MODEL, model / "whole")
    (model / "shape").mkdir()
    shutil.copy(MODEL / "config.json", model / "shape")
    for lost, ignored in (("weights", "model.safetensors"), ("tokenizer", "tokenizer*")):
        shutil.copytree(MODEL, model / f"no-{lost}", ignore=shutil.ignore_patterns(ignored))
    write_folder(model / "gguf", {"q4.gguf": b"GGUF\x03\0\0\0"})
    shutil.copytree(model / "gguf", model / "gguf-config")
    shutil.copy(MODEL / "config.json", model / "gguf-config")
    make_odd(root)
    (root / ODD / "file.json").write_text("{}")


def make_odd(root: Path) -> None:
    write_folder(root / ODD / "artifact", measured_files())
    shutil.copytree(MODEL, root / ODD / "model")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    make_world(root)
    return root


@pytest.fixture
def world(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What stands for the words in capitals; the current folder is that of the table."""
    monkeypatch.chdir(made)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield names(taken.getsockname()[1])


def names(port: int) -> dict[str, str]:
    return {
        "MODEL": str(MODEL),
        "K_NAME": K_NAME,
        "TINY": TINY,
        "ODD": ODD,
        "LONG": "a" * 5000,
        "PORT": str(port),
    }


def command_line(words: str, world: dict[str, str]) -> list[str]:
    given = shlex.split(words)
    for name, value in world.items():
        given = [word.replace(name, value) for word in given]
    return given


def found(told: str) -> tuple[str, str]:
    """The code of what a command printed with `--json`, and its words."""
    value = parsed(told)
    if "error" in value:
        error = value["error"]
        return error["code"], f"{error['message']} {error['hint']}"
    (result,) = value["results"]
    return result.get("code") or result["outcome"], json.dumps(result)


def everything(root: Path) -> dict[Path, int]:
    """Every file and folder, and when a file was written last."""
    return {x: 0 if x.is_dir() else x.lstat().st_mtime_ns for x in root.rglob("*")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.words)
def test_a_mistake_is_refused_in_one_line(row: Row, world: dict[str, str], made: Path) -> None:
    before, given = everything(made), command_line(row.words, world)
    at = given.index("--") if "--" in given else len(given)
    status, told, remarks = ran([*given[:at], "--json", *given[at:]])
    code, said = found(told)
    assert f"{status} {code:<24} {row.words}" == f"{row.exit_code} {row.code:<24} {row.words}", said
    assert row.holds in said, said
    status, told, remarks = ran(given)
    assert status == row.exit_code and everything(made) == before
    lines = [line for line in remarks.splitlines() if line.startswith("error: ")]
    assert len(lines) == ("FAILED" not in told), remarks
    assert len("".join(lines)) < 1000 and "internal error" not in remarks
    assert "Traceback" not in remarks and "udcff" not in remarks
    assert "ODD" not in row.words or r"d\xff" in lines[0]


QUICK = ("compute", "eval", "fit", "merge-moments", "pull", "ruler", "site")
"""Commands that import torch for their work."""
CHILD = """
import json, os, sys
from oscar_zoo.cli.main import run
lines = json.loads(sys.argv[1])
run(lines[0])  # imports what most of them import
for words in lines:
    child = os.fork()
    if child == 0:
        code = run(words)
        print("loaded", sorted({"torch", "transformers", "sglang"} & set(sys.modules)), flush=True)
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_no_heavy_library_is_imported_for_a_simple_mistake(world: dict[str, str]) -> None:
    """Those of the table that need no model, and a current folder that cannot be written."""
    told = [row for row in ROWS if row.words.startswith(QUICK)]
    told = [row for row in told if not re.search("ODD|./models/|no-such-org", row.words)]
    asked = ("--device gpu", "--cache nothing", "--method oscar --bits 3")
    told = [x for x in told if x.exit_code in (3, 7, 8) or any(one in x.words for one in asked)]
    lines = [command_line(row.words, world) for row in told]
    assert len(lines) > 40 and loaded_by(lines) == [row.exit_code for row in told]
    os.chdir("/proc")
    compute = ["compute", str(MODEL), "--calib-data", str(MODEL / "config.json")]
    assert loaded_by([compute]) == [8]


def loaded_by(lines: list[list[str]]) -> list[int]:
    """The exit codes of command lines, none of which may import a heavy library."""
    command = [sys.executable, "-c", CHILD, json.dumps(lines)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    shown = [
        line for line in child.stdout.splitlines() if line.startswith("loaded") or line.isdigit()
    ]
    heavy = [line for line, loaded in zip(lines, shown[::2], strict=True) if loaded != "loaded []"]
    assert heavy == [], child.stderr
    return [int(code) for code in shown[1::2]]


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with everything that a command takes in the odd one."""
    monkeypatch.chdir(tmp_path)
    hub_with(tmp_path / "hub", measured_files())
    make_odd(tmp_path)
    (tmp_path / ODD / "text.txt").write_text("some words and others " * 3000)
    moments = random_moments()
    save_moments(tmp_path / ODD / "moments.safetensors", moments, describe(moments))
    return tmp_path


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_path_that_is_no_utf8_works(odd: Path, more: list[str]) -> None:
    for words in (
        "verify ./ODD/artifact",
        "verify ODD/",
        "info ./ODD/artifact",
        "card ./ODD/artifact",
        "pull tiny-qwen3-hard --hub file:hub --no-lock --output ODD/out",
        "publish ./ODD/artifact --hub file:copy --create --dry-run",
        "publish ./ODD/artifact --hub file:copy --create",
        f"serve ./ODD/artifact --model {MODEL} --device cpu --print",
        f"compute {MODEL} --calib-data ODD/text.txt --calib-tokens 600 --method hadamard"
        " --output-dir ODD/made",
        "fit ODD/moments.safetensors --method hadamard --output-dir ODD/fitted",
        "plot ODD/moments.safetensors --output ODD/plot.html",
        "scores ./ODD/artifact",
        "site --hub file:hub --output ODD/site",
    ):
        code, told, remarks = ran([*(word.replace("ODD", ODD) for word in words.split()), *more])
        assert code == 0, told + remarks
        assert "internal error" not in told + remarks and "udcff" not in remarks
        if more:
            json.loads(told)
        else:
            assert "udcff" not in told


def test_a_command_for_a_shell_names_a_path_that_is_no_utf8(odd: Path, cli: Cli) -> None:
    cli(2, "cache", "rm", f"./{ODD}/artifact")
    assert r"oscar-zoo verify $'./d\xff/artifact'" in cli.err
    line = cli(0, "serve", f"./{ODD}/artifact", "--model", MODEL, "--device", "cpu", "--print")
    words = ["bash", "-c", f"printf '%s\\n' {line}"]
    said = subprocess.run(words, capture_output=True, check=True, timeout=60).stdout
    assert os.fsencode(odd / ODD / "artifact") in said
