"""A flag behind `--` that SGLang's own parser refuses is a usage error of every command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engines import MODEL, environment, needs_sglang
from forked_commands import ForkedCli
from tiny_artifacts import artifact_files, write_folder

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(300)]

COMMANDS = {
    "serve": ("serve", "./rotation", "--model", str(MODEL)),
    "eval": ("eval", "./rotation", "--model", str(MODEL), "--engine", "sglang"),
    "bench serve": ("bench", "serve", "--dummy-weights", "tiny-qwen3-hard", "--caches=bf16,int2"),
    "bench load": ("bench", "load", "--dummy-weights", "tiny-qwen3-hard"),
}


@pytest.fixture
def cli(tmp_path: Path) -> ForkedCli:
    (tmp_path / "tmp").mkdir()
    write_folder(tmp_path / "rotation", artifact_files())
    own = {"TMPDIR": str(tmp_path / "tmp"), "OSCAR_ZOO_PORT": os.environ["OSCAR_ZOO_PORT"]}
    return ForkedCli(environment(HF_HUB_OFFLINE="1", **own), tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_ends_with_2(cli: ForkedCli, command: str) -> None:
    done = cli(*COMMANDS[command], "--json", "--", "--no-such-flag=1")
    assert done.code == 2, done.err
    error = done.json["error"]
    assert error["code"] == "usage.engine_flag"
    assert "--no-such-flag" in error["message"] and "launch_server --help" in error["hint"]


def test_a_bad_value_ends_with_2(cli: ForkedCli) -> None:
    done = cli(*COMMANDS["serve"], "--", "--page-size=two")
    assert done.code == 2 and "page-size: invalid int value: 'two'" in done.err
    assert [line for line in done.err.splitlines() if line.startswith("error: ")] == [
        done.err.splitlines()[-1]
    ]
