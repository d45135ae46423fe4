"""The command line of `compute`: what it refuses before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_zoo.cli.main import run

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard")
REFUSED = {
    "X --context-length 9": "--context-length",
    "X --engine sglang": "--engine",
    "X -- --attention-backend=triton": "--attention-backend=triton",
    "--calib-tokens 9": "no model is given",
    f"{EXAMPLE} --model-path {EXAMPLE}": "say the same",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_before_anything_is_started(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compute", *text.split()]) == 2
    line = capsys.readouterr().err.strip()
    assert REFUSED[text] in line and "\n" not in line
