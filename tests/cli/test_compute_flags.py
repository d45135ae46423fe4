"""The command line of `compute`: which flags of SGLang it takes, and what an error suggests."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from oscar_zoo.app.compute import compute_artifact
from oscar_zoo.cli.commands.compute import command
from oscar_zoo.cli.main import run
from oscar_zoo.errors import UsageError

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard")
MEANT = {
    "X --attention-backend triton": "X --engine sglang -- --attention-backend=triton",
    "--mem-fraction-static=0.5 --engine sglang X -- --page-size=1": (
        "--engine sglang X -- --page-size=1 --mem-fraction-static=0.5"
    ),
    "X --tp 2": "X --tensor-parallel 2 --engine sglang",
    "X --engine=sglang --tensor-parallel-size=2": "X --engine=sglang --tensor-parallel=2",
}
REFUSED = {
    "X --engine sglang -- --max-total-tokens=9": (
        "--max-total-tokens is not allowed after --: every sequence runs alone"
    ),
    "X --context-length 9": "use --seq-len in front of --",
    "X -- --attention-backend=triton": "--attention-backend=triton is for an engine. Add --engine",
    "--model-path X --engine sglang -- --tp=2": "use --tensor-parallel in front of --",
    "-- --attention-backend=triton": "no model is given",
    f"{EXAMPLE} --device cpu --engine sglang -- --attention-backend triton": (
        "triton computes wrongly in bfloat16 on a CPU"
    ),
}


@pytest.mark.parametrize("text", MEANT)
def test_the_line_that_was_meant(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compute", *shlex.split(text)]) == 2
    line = capsys.readouterr().err.strip()
    assert line.endswith(f" oscar-zoo compute {MEANT[text]}") and "\n" not in line
    meant = shlex.split(MEANT[text])
    assert command.make_context("compute", meant).params["model"] == "X"


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_before_anything_is_started(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compute", *text.split()]) == 2
    line = capsys.readouterr().err.strip()
    assert REFUSED[text] in line and "\n" not in line


def test_the_python_call_refuses_the_same() -> None:
    with pytest.raises(UsageError, match="--tp is not allowed after --"):
        compute_artifact(EXAMPLE, engine="sglang", engine_flags=["--tp=2"])
    with pytest.raises(UsageError, match="is for an engine"):
        compute_artifact(EXAMPLE, engine_flags=["--page-size=1"])
