"""The main job end to end, exactly as `make demo` runs it: compute, verify, publish, pull, measure,
serve."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines import needs_sglang

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_sglang
def test_the_demo_ends_with_a_table_and_an_answer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/demo.py"), "--work", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for step in ("compute", "verify", "publish", "pull", "eval", "serve"):
        assert f"$ oscar-zoo {step} " in done.stdout
    rows = re.findall(r"^(\S.*?)  +([\d.]+) +([\d.,]+) +([\d.]+)%$", done.stdout, re.MULTILINE)
    perplexity = {name: float(value.replace(",", "")) for name, _, value, _ in rows}
    order = ["BF16", "INT2 as computed", "Hadamard INT2, clipped", "Hadamard INT2", "INT2"]
    assert sorted(perplexity, key=lambda name: perplexity[name]) == order
    assert {name: bits for name, bits, _, _ in rows}["INT2 as computed"] == "2.50"
    assert perplexity["INT2 as computed"] < 1.015 * perplexity["BF16"]
    assert re.search(r"^Kept wush", done.stdout, re.MULTILINE)
    recall = {name: float(value) for name, _, _, value in rows}
    assert recall["BF16"] > 99 and recall["INT2 as computed"] > 90 > recall["INT2"]
    answered = re.search(r"expected '(\d{6})', answered '(.*)'", done.stdout)
    assert answered is not None and answered[2].strip() == answered[1]
