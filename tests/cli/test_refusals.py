"""What a tired person gets wrong: one line, the right exit code and code, nothing half-written.

The mistakes are in `refusals.txt`, one command line each. `python tests/cli/test_refusals.py` runs
them and writes the codes that it found, to be read before they are kept.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_output import parsed, ran
from measured_artifacts import measured_files
from random_moments import describe, random_moments
from tiny_artifacts import K_NAME, V_NAME, artifact_files, payload, write_folder

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.moments_file import save_moments

TABLE = Path(__file__).with_name("refusals.txt")
MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TINY = "tiny-qwen3-hard"
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
    (root / "loop").symlink_to("loop")
    (root / "key").write_text("secret")
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
        "words": json.dumps(config | {"num_hidden_layers": "four"}).encode(),
    }.items():
        shutil.copytree(MODEL, model / name)
        (model / name / "config.json").write_bytes(data)
    shutil.copytree(MODEL, model / "whole")
    for lost in ("weights", "tokenizer"):
        ignored = {"weights": "model.safetensors", "tokenizer": "tokenizer*"}[lost]
        shutil.copytree(MODEL, model / f"no-{lost}", ignore=shutil.ignore_patterns(ignored))
    write_folder(root / ODD / "artifact", measured_files())
    shutil.copytree(MODEL, root / ODD / "model")
    (root / ODD / "file.json").write_text("{}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("world")
    make_world(root)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield names(root, taken.getsockname()[1])


def names(root: Path, port: int) -> dict[str, str]:
    return {
        "ROOT": str(root),
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
def test_a_mistake_is_refused_in_one_line(
    row: Row, world: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(world["ROOT"])
    monkeypatch.chdir(root)
    before, given = everything(root), command_line(row.words, world)
    at = given.index("--") if "--" in given else len(given)
    status, told, remarks = ran([*given[:at], "--json", *given[at:]])
    assert status == row.exit_code, told + remarks
    code, said = found(told)
    assert code == row.code and row.holds in said, said
    status, told, remarks = ran(given)
    assert status == row.exit_code and everything(root) == before
    lines = [line for line in remarks.splitlines() if line.startswith("error: ")]
    assert len(lines) == ("FAILED" not in told), remarks
    assert len("".join(lines)) < 1000 and "internal error" not in remarks
    assert "Traceback" not in remarks and "udcff" not in remarks
    assert "ODD" not in row.words or r"d\xff" in lines[0]


if __name__ == "__main__":
    import tempfile

    folder = Path(tempfile.mkdtemp())
    make_world(folder)
    os.chdir(folder)
    made = []
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        world_of_now = names(folder, listening.getsockname()[1])
        for line in TABLE.read_text().splitlines():
            if line.startswith("# ") or not line:
                made.append(line)
                continue
            words, _, holds = line.partition("  # ")
            words = words.split(maxsplit=2)[2] if words[0].isdigit() else words
            given = command_line(words, world_of_now)
            at = given.index("--") if "--" in given else len(given)
            status, told, remarks = ran([*given[:at], "--json", *given[at:]])
            try:
                code, _ = found(told)
            except Exception as error:
                code = f"NONE:{error!r}"[:60]
            made.append(f"{status} {code:<24} {words}" + (f"  # {holds}" if holds else ""))
    TABLE.write_text("\n".join(made) + "\n")
