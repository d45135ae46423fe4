"""What the command line of `eval` asks for: the defaults of the requests, and nothing twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.app import evaluate_server
from oscar_zoo.app.evaluate import EvaluateRequest
from oscar_zoo.app.evaluate_server import ServerEvaluateRequest
from oscar_zoo.artifact.specs import Clip
from oscar_zoo.cli.benchmark_options import TEXT_TASKS
from oscar_zoo.cli.commands import eval as eval_command
from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.variants import ServerVariant
from oscar_zoo.evaluate.ablation import Values
from oscar_zoo.evaluate.benchmarks.tasks import NAMES

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests of use cases that do nothing."""
    requests: list[Any] = []

    def take(request: object, observer: object) -> None:
        requests.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_command, "evaluate", take)
    monkeypatch.setattr(evaluate_server, "evaluate", take)
    return requests


def test_without_options_the_requests_have_their_defaults(asked: list[Any]) -> None:
    run(["eval", "Name"])
    run(["eval", "Name", "--engine", "sglang"])
    assert asked == [EvaluateRequest("Name"), ServerEvaluateRequest("Name")]


def test_one_clip_is_for_every_form_and_the_other_values_for_this_process(
    asked: list[Any],
) -> None:
    run(["eval", "Name", "--sink", "0,64,0", "--recent", "128", "--group-size", "32,64"])
    run(["eval", "Name", "--clip", "0.9,0.8", "--clip", "0,0"])
    values = Values(sink=(0, 64), recent=(128,), group_size=(32, 64))
    clips = Values(clip=(Clip(k=0.9, v=0.8), Clip(k=0.0, v=0.0)))
    assert [request.values for request in asked] == [values, clips]


@pytest.mark.parametrize("server", [["--engine", "sglang"], ["--task", "gsm8k"]])
def test_a_server_is_measured_with_the_recipe_that_it_serves(
    server: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--sink", "--recent", "--group-size"):
        line = refused(capsys, 2, "eval", "Name", option, "32", *server)
        assert line.startswith(f"error: {option} is for the model in this process")
    clips = ["--clip", "0.9,0.9", "--clip", "0.8,0.8"]
    assert "a list of --clip is for" in refused(capsys, 2, "eval", "Name", *clips, *server)


def test_options_reach_the_request(asked: list[Any], tmp_path: Path) -> None:
    common = [
        "--task",
        "recall",
        "--clip",
        "0.5,0.6",
        "--answers",
        "3",
        "--hub",
        f"file:{tmp_path}",
    ]
    run(["eval", "Name", *common])
    servers = ["--engine", "sglang", "--chunk", "64,128", "--radix", "off", "--timeout", "7"]
    run(["eval", "Name", *common, *servers, "--", "--max-running-requests=2"])
    clip = Clip(k=0.5, v=0.6)
    given: dict[str, Any] = {"tasks": ("recall",), "answers": 3, "hubs": (f"file:{tmp_path}",)}
    here, there = asked
    assert here == EvaluateRequest("Name", **given, values=Values(clip=(clip,)))
    wanted = tuple(ServerVariant(chunk=chunk, radix=False) for chunk in (64, 128))
    flags = ("--max-running-requests=2",)
    given |= {"clip": clip, "variants": wanted, "timeout": 7, "extra": flags}
    assert there == ServerEvaluateRequest("Name", **given)


def test_a_window_longer_than_the_text_names_the_options_that_help(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(write_folder(tmp_path / "rotation", artifact_files()))
    (tmp_path / "text.txt").write_text("a short text " * 200, "utf-8")
    data = ["--data", str(tmp_path / "text.txt")]
    line = refused(capsys, 2, "eval", folder, "--model", MODEL, *data, "--length", "2000").strip()
    assert "one window needs 2000" in line
    assert line.endswith("Give a longer text with --data, or a smaller --length")
    line = refused(capsys, 2, "eval", folder, "--model", MODEL, "--length", "300").strip()
    assert line.endswith("Use a larger --length, or smaller windows (--sink, --recent)")


def test_windows_longer_than_the_model_takes_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(write_folder(tmp_path / "rotation", artifact_files()))
    (tmp_path / "text.txt").write_text("a short text " * 20, "utf-8")
    words = ["--data", str(tmp_path / "text.txt"), "--length", "4096"]
    assert run(["eval", folder, "--model", str(MODEL), *words]) == 2  # too short for any window
    assert "takes 2,048 tokens, so windows have no more than that." in capsys.readouterr().err


def test_the_help_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "--help"]) == 0
    named = re.findall(r"\w+", capsys.readouterr().out)
    assert {*NAMES, *TEXT_TASKS} <= {*named}
