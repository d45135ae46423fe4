"""The benchmark of caches runs on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


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
    assert plain["bytes"] == 2 * 2 * 8 * 128 * 2 * (512 + 5)
    assert 0 < ours["bytes"] < plain["bytes"] and ours["bytes"] == rows[KEEP]["bytes"]
    assert ours["ms"] > 0 and ours["peak_bytes"] >= 0
    others = [row for name, row in rows.items() if name not in ("DynamicCache", "OscarCache", KEEP)]
    assert len(others) == 4 and all(("ms" in row) != ("not_run" in row) for row in others)


KEEP = "OscarCache, attention='keep'"
