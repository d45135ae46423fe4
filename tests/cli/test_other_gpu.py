"""`--device cuda:N` of the commands that start servers to measure them: the engine gets the
number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from engines import MODEL, needs_sglang
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.errors import ServerFailed
from oscar_zoo.models import hardware

SIZES = ("ROTATION", "--model", str(MODEL), "--context=200", "--new-tokens=16")
COMMANDS = {
    "eval": ["eval", "ROTATION", "--model", str(MODEL), "--engine", "sglang", "--windows=1"],
    "load": ["bench", "load", *SIZES],
    "serve": ["bench", "serve", *SIZES],
}


@pytest.mark.sglang
@needs_sglang
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("device", "number"), [("cuda", None), ("cuda:3", "3")])
def test_the_engine_starts_on_the_gpu_that_was_named(
    name: str, device: str, number: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def running(plan: Any, log: Path) -> NoReturn:
        job = Path(plan.argv[-1])  # the flags of `bench serve` are in a file
        started.append(json.loads(job.read_text())["arguments"] if job.is_file() else plan.argv)
        raise ServerFailed("this machine has no such GPU")

    monkeypatch.setattr(hardware, "check_gpu", lambda number: None)
    monkeypatch.setattr(server, "running", running)
    rotation = str(write_folder(tmp_path / "rotation", artifact_files()))
    assert (
        run([rotation if x == "ROTATION" else x for x in COMMANDS[name]] + ["--device", device])
        == 1
    )
    assert len(started) == (3 if name == "serve" else 1)
    for flags in started:
        given = dict(x.split("=", 1) for x in flags if x.startswith("--") and "=" in x)
        assert given.get("--base-gpu-id") == number
        if name == "eval":
            assert 0 < int(given["--max-total-tokens"]) < 1_000_000, "it must not take a whole GPU"
