"""What the command line of `eval` means: defaults, lists, and options of another way to measure."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_output import refused
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.artifact.specs import Clip
from oscar_zoo.cli.commands.eval import TEXT_TASKS
from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.variants import ServerVariant
from oscar_zoo.evaluate import in_process, servers
from oscar_zoo.evaluate.benchmarks import suite
from oscar_zoo.evaluate.benchmarks.tasks import NAMES
from oscar_zoo.evaluate.params import EvalParams, again

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parameters of use cases that do nothing."""
    found: list[Any] = []

    def take(params: object, observer: object) -> None:
        found.append(params)
        raise KeyboardInterrupt

    for module in (in_process, servers):
        monkeypatch.setattr(module, "evaluate", take)
    monkeypatch.setattr(suite, "run_benchmarks", take)
    return found


def test_options_reach_the_parameters(asked: list[Any], tmp_path: Path) -> None:
    common = ["--task", "recall", "--clip", "0.5,0.6", "--answers", "3", "--hub", "file:x"]
    run(["eval", "Name"])
    run(["eval", "Name", *common])
    flags = ["--engine", "sglang", "--chunk", "64,128", "--radix", "off", "--timeout", "7"]
    run(["eval", "Name", *common, *flags, "--", "--max-running-requests=2"])
    run(["eval", "Name", "--task", "gsm8k", "--fp8", "--no-thinking", "--limit", "3"])
    plain, here, there, questions = asked
    assert plain == EvalParams("Name")
    given: dict[str, Any] = {"tasks": ("recall",), "answers": 3, "hubs": ("file:x",)}
    given |= {"clips": ("0.5,0.6",)}
    assert here == EvalParams("Name", **given)
    given |= {"engine": "sglang", "chunk": "64,128", "radix": "off", "timeout": 7}
    assert there == EvalParams("Name", **given, engine_flags=("--max-running-requests=2",))
    wanted = tuple(ServerVariant(chunk=chunk, radix=False) for chunk in (64, 128))
    assert servers.variants_of(there) == wanted
    assert questions == EvalParams("Name", tasks=("gsm8k",), fp8=True, thinking=False, limit=3)


def test_lists_are_the_values_to_measure_with(asked: list[Any]) -> None:
    run(["eval", "Name", "--sink", "0,64,0", "--recent", "128", "--group-size", "32,64"])
    run(["eval", "Name", "--clip", "0.9,0.8", "--clip", "0,0"])
    values = {"sink": (0, 64), "recent": (128,), "group_size": (32, 64)}
    clips = {"clip": (Clip(k=0.9, v=0.8), Clip(k=0.0, v=0.0))}
    assert [in_process.values_of(params) for params in asked] == [values, clips]


def test_the_command_line_again_means_the_same_with_a_folder(asked: list[Any]) -> None:
    words = ["--task", "recall", "--clip", "0.5,0.6", "--no-stream-weights", "--hub", "file:a b"]
    run(["eval", "A name", "--model", "m", *words, "--engine", "sglang", "--", "--page-size=2"])
    run(shlex.split(again("eval", asked[0]))[1:])
    assert asked[1] == replace(asked[0], model="FOLDER")


@pytest.mark.parametrize("server", [["--engine", "sglang"], ["--task", "gsm8k"]])
@pytest.mark.parametrize(
    "given", [["--sink", "32"], ["--recent", "32"], ["--clip", "0.9,0.9", "--clip", "0.8,0.8"]]
)
def test_a_server_is_measured_with_the_recipe_that_it_serves(
    server: list[str], given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, 2, "eval", "Name", *given, *server)
    assert f"{given[0]} is for the model in this process" in line


def test_a_window_longer_than_the_text_names_the_options_that_help(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(write_folder(tmp_path / "rotation", artifact_files()))
    (tmp_path / "text.txt").write_text("a short text " * 200, "utf-8")
    data = ["--data", str(tmp_path / "text.txt")]
    line = refused(capsys, 2, "eval", folder, "--model", MODEL, *data, "--length", "2000").strip()
    assert "--data" in line and "--length" in line
    words = [*data, "--length", "4096"]
    assert run(["eval", folder, "--model", str(MODEL), *words]) == 2  # too short for any window
    assert "takes 2,048 tokens, so windows have no more than that." in capsys.readouterr().err


def test_the_help_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "--help"]) == 0
    named = re.findall(r"\w+", capsys.readouterr().out)
    assert {*NAMES, *TEXT_TASKS} <= {*named}
