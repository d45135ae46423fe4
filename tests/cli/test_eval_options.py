"""What the command line of `eval` asks for: the defaults of the requests, and nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oscar_zoo.app import evaluate_server
from oscar_zoo.app.evaluate import EvaluateRequest
from oscar_zoo.app.evaluate_server import ServerEvaluateRequest
from oscar_zoo.artifact.specs import Clip
from oscar_zoo.cli.commands import eval as eval_command
from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.variants import ServerVariant


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
    given: dict[str, Any] = {"tasks": ("recall",), "clip": Clip(k=0.5, v=0.6), "answers": 3}
    given["hubs"] = (f"file:{tmp_path}",)
    here, there = asked
    assert here == EvaluateRequest("Name", **given)
    wanted = tuple(ServerVariant(chunk=chunk, radix=False) for chunk in (64, 128))
    flags = ("--max-running-requests=2",)
    assert there == ServerEvaluateRequest("Name", **given, variants=wanted, timeout=7, extra=flags)
