"""The page about transformers says what is true, and the benchmark of caches runs on a CPU."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import blocks
from tiny_artifacts import payload, write_folder
from transformers import Qwen3Config

from oscar_zoo.transformers import OscarCache

ROOT = Path(__file__).resolve().parents[3]
PAGE, EXAMPLE = ROOT / "docs/transformers.md", ROOT / "examples/models/tiny-qwen3-hard"
KEEP = "OscarCache, attention='keep'"


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "examples/text/validation.txt").read_text("utf-8")
    (tmp_path / "long.txt").write_text(text[:2000])
    write_folder(tmp_path / "rotation", payload())
    names = {"Qwen/Qwen3-0.6B": str(EXAMPLE), '"Qwen3-0.6B"': '"./rotation"'}
    code = "\n".join(blocks(PAGE, "python"))
    for name, ours in names.items():
        assert name in code
        code = code.replace(name, ours)
    scope: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), scope)
    start, ids = scope["start"], scope["inputs"].input_ids
    assert start.get_seq_length() == ids.shape[1] > 320
    assert scope["cache"].get_seq_length() == scope["batch"].input_ids.shape[1] + 19


def test_the_memory_of_the_page() -> None:
    config = Qwen3Config(
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|", PAGE.read_text(), re.M
    )
    assert len(rows) == 4
    for tokens, exact, ours, less in ([float(x.replace(",", "")) for x in row] for row in rows):
        found = OscarCache.bytes_for(config, int(tokens)) / 1e6
        assert round(tokens * 36 * 2 * 8 * 128 * 2 / 1e6) == exact
        assert (round(found), round(exact / found, 1)) == (ours, less)


@pytest.mark.slow
def test_decode_steps_of_every_cache(tmp_path: Path) -> None:
    program, output = ROOT / "contrib/benchmarks/oscar_cache.py", tmp_path / "steps.json"
    shape = ("--layers", "2", "--tokens", "512", "--batch", "1", "--steps", "2")
    command = [sys.executable, program, "steps", "--device", "cpu", *shape, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert found["device"] == "cpu" and {"torch", "transformers", "threads"} <= {*found}
    rows = {row["cache"]: row for row in found["rows"]}
    assert {(row["batch"], row["tokens"]) for row in rows.values()} == {(1, 512)}
    plain, ours = rows["DynamicCache"], rows["OscarCache"]
    assert plain["bytes"] == 2 * 2 * 8 * 128 * 2 * (512 + 6)
    assert 0 < ours["bytes"] < plain["bytes"] and ours["bytes"] == rows[KEEP]["bytes"]
    assert ours["ms"] > 0 and ours["peak_bytes"] >= 0
    others = [row for name, row in rows.items() if name not in ("DynamicCache", "OscarCache", KEEP)]
    assert len(others) == 4 and all(("ms" in row) != ("not_run" in row) for row in others)
