"""Simple mistakes are told before torch and transformers are imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_artifacts import artifact_files, write_folder

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
UNWRITABLE = "/proc/nothing/out"
"""Nobody can make this folder, not even the administrator of the machine."""
CHILD = """
import json, os, sys
from oscar_zoo.cli.main import run
for words in json.loads(sys.argv[1]):
    child = os.fork()  # each finds what a new process would
    if child == 0:
        code = run(words)
        print("loaded", sorted({"torch", "transformers", "sglang"} & set(sys.modules)), flush=True)
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_folder(tmp_path / "artifact", artifact_files())
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "damaged.safetensors").write_bytes(b"\0" * 100)
    (tmp_path / "captured").mkdir()
    (tmp_path / "captured.moments.safetensors").write_bytes(b"\0" * 100)
    # Such a file begins with the length of its header; more of it is not read early.
    (tmp_path / "moments.safetensors").write_bytes((92).to_bytes(8, "little") + b"\0" * 92)
    return tmp_path


def test_no_heavy_library_is_imported_for_a_simple_mistake(place: Path) -> None:
    expected = mistakes()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([words for _, words in expected])],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = child.stdout.splitlines()
    told = list(zip(lines[1::2], lines[::2], strict=True))
    assert told == [(str(code), "loaded []") for code, _ in expected], (lines, child.stderr)


def test_a_current_folder_that_cannot_be_written_is_told_before_the_work() -> None:
    """Where no folder is named, the artifact goes into the current one."""
    words = ["compute", str(MODEL), "--calib-data", str(MODEL / "config.json")]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([words])],
        cwd="/proc",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.stdout.splitlines() == ["loaded []", "8"], child.stderr
    assert child.stderr.startswith("error: cannot write /proc, and no --output-dir is given: ")


def mistakes() -> list[tuple[int, list[str]]]:
    """Exit codes, and command lines in the folder `place`."""
    evaluate = ["eval", "./artifact", "--model", str(MODEL)]
    compute = ["compute", str(MODEL)]
    fit = ["fit", "./moments.safetensors", "--method", "oscar"]
    return [
        (3, ["eval", "./nowhere"]),
        (3, ["eval", "no-such-artifact", "--offline"]),
        (3, ["eval", "./artifact", "--model", "./nowhere"]),
        (3, ["eval", "./artifact", "--model", "no-such-model"]),
        (3, ["eval", "./artifact", "--model", "./empty"]),
        (2, ["eval", "./artifact"]),  # no model is known
        (3, [*evaluate, "--data", "./nowhere.txt"]),
        (2, [*evaluate, "--device", "gpu"]),
        (3, ["ruler", "./nowhere"]),
        (3, ["ruler", "./artifact", "--model", "./nowhere"]),
        (2, ["ruler", "./artifact", "--model", str(MODEL), "--cache", "nothing"]),
        (2, ["compute"]),
        (3, ["compute", "./nowhere"]),
        (3, ["compute", "no-such-model", "--offline"]),
        (3, ["compute", "./empty"]),
        (3, [*compute, "--calib-data", "./nowhere.txt"]),
        (3, [*compute, "--calib-data", "./empty"]),
        (2, [*compute, "--calib-data", "./text.txt", "--device", "gpu"]),
        (7, [*compute, "--output-dir", "./artifact"]),
        (8, [*compute, "--output-dir", UNWRITABLE]),
        (8, [*fit, "--output-dir", UNWRITABLE]),
        (8, ["pull", "no-such-artifact", "--output", UNWRITABLE]),
        (8, ["site", "--hub", "file:./nowhere", "--output", UNWRITABLE]),
        (3, ["fit", "./nowhere", "--method", "oscar"]),
        (4, ["fit", "./damaged.safetensors", "--method", "oscar"]),
        (3, ["fit", "./artifact", "--method", "oscar"]),  # a folder, and no moments beside it
        (4, ["fit", "./captured", "--method", "oscar"]),  # those beside it are damaged
        (7, [*fit, "--output-dir", "./artifact"]),
        (2, [*fit, "--bits", "3"]),
        (3, ["merge-moments", "./artifact", "./moments.safetensors", "--output", "./out"]),
        (3, ["merge-moments", "./nowhere", "./moments.safetensors", "--output", "./out"]),
    ]
