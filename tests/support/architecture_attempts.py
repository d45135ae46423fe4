"""What works with the small models of `architectures`: `compute`, `eval`, and a server on this CPU.

Every attempt ends in one word and, where something does not work, the sentence that a user gets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from architectures import write_architecture, write_config
from engines import environment
from random_qwen3 import EXAMPLE

Outcome = Literal["works", "refused", "fails", "stock fails", "stock differs", "not tried"]

TEXT = EXAMPLE.parents[1] / "text" / "calibration.txt"
HELD_OUT = TEXT.with_name("validation.txt")
PROMPT, NEW, LONG = 48, 16, 500
"""Tokens of a prompt that the windows hold whole, of an answer, and of a prompt that they do not
hold."""
TIE = 0.03
"""Two tokens whose logits differ by less may change places."""
ENGINE = ("--dtype=float32", "--disable-cuda-graph", "--max-total-tokens=4096")
START_SECONDS = 400


@dataclass(frozen=True)
class Attempt:
    """What came of it.

    Attributes:
        outcome: `refused` by a sentence of ours; `stock fails` where SGLang starts on no CPU
            without us either; `stock differs` where tokens are those of SGLang without us, and
            not those of transformers; `not tried` where no server was started.
        said: the sentence, with what works instead; empty where it works.
    """

    outcome: Outcome
    said: str = ""


def compute_and_evaluate(name: str, work: Path) -> tuple[Attempt, Attempt]:
    """Compute a rotation with a fixed method and measure its perplexity, in this process.

    Args:
        name: of an architecture.
        work: a folder; `model` and `rotation` in it are written again.
    """
    from oscar_zoo import compute_artifact, evaluate_artifact
    from oscar_zoo.errors import OscarZooError

    shutil.rmtree(work, ignore_errors=True)
    model, rotation = work / "model", work / "rotation"
    try:
        write_config(name, model)
        compute_artifact(
            _with_weights(name, model),
            calib_data=TEXT,
            calib_tokens=1024,
            seq_len=512,
            method="oscar",
            output=rotation,
            device="cpu",
        )
    except OscarZooError as error:
        refused = Attempt("refused", _sentence(error.message, error.hint))
        return refused, refused
    try:
        report = evaluate_artifact(
            rotation,
            model=model,
            tasks=["perplexity"],
            data=str(HELD_OUT),
            windows=1,
            length=512,
            device="cpu",
        )
    except OscarZooError as error:
        return Attempt("works"), Attempt("refused", _sentence(error.message, error.hint))
    assert all(row.perplexity is not None and row.perplexity < 1e6 for row in report.rows)
    return Attempt("works"), Attempt("works")


def serve(name: str, work: Path) -> Attempt:
    """Serve the rotation that `compute_and_evaluate` left in `work`, and compare tokens.

    The answer to a short prompt must be that of transformers, because the windows hold all of it.
    The answer to a long one must come.
    """
    write_architecture(name, work / "float32", dtype="float32")
    command = [sys.executable, "-m", "oscar_zoo", "serve", str(work / "rotation")]
    command += ["--model", str(work / "float32"), "--device", "cpu", "--detach", "--json"]
    port = _free_port()
    state = {f"OSCAR_ZOO_{kind}": str(work / kind.lower()) for kind in ("STATE", "CACHE", "DATA")}
    settings = {**os.environ, **state, "HF_HUB_OFFLINE": "1"}
    wait = ["--port", str(port), "--timeout", str(START_SECONDS), "--", *ENGINE]
    done = subprocess.run(
        [*command, *wait], env=settings, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return _not_served(done, work)
    try:
        short = _answer(port, prompt(PROMPT))
        assert len(_answer(port, prompt(LONG))) == NEW
    finally:
        stop = [sys.executable, "-m", "oscar_zoo", "stop", str(port), "--now"]
        subprocess.run(stop, env=settings, capture_output=True, check=False)
    at = differs(work / "float32", prompt(PROMPT), short)
    if at is None:
        return Attempt("works")
    if _stock_answer(work / "float32", prompt(PROMPT)) == short:
        return Attempt("stock differs")
    return Attempt("fails", f"Token {at} of the answer is not that of transformers.")


def prompt(tokens: int) -> list[int]:
    """Random tokens, none of them special."""
    draw = torch.Generator().manual_seed(5)
    return torch.randint(16, 2048, (tokens,), generator=draw).tolist()


def differs(model: Path, ids: Sequence[int], answer: Sequence[int]) -> int | None:
    """The first token of a greedy answer that transformers would not give, or `None`."""
    from oscar_zoo.models.loading import load_model

    loaded = load_model(str(model))
    for at, token in enumerate(answer):
        seen = torch.tensor([[*ids, *answer[:at]]])
        with torch.inference_mode():
            logits = loaded.model(input_ids=seen, use_cache=False).logits[0, -1]
        if float(logits.max() - logits[token]) > TIE:
            return at
    return None


def _with_weights(name: str, model: Path) -> Path:
    """The checkpoint, or `model` as it is where its configuration alone is refused."""
    from oscar_zoo.models.inspect import inspect_model

    inspect_model(str(model))
    return write_architecture(name, model)


def _sentence(message: str, hint: str | None) -> str:
    """What a user is told, with `it` in place of the folder and the type of the model."""
    said = re.sub(r"^model \(\w+\) ", "it ", message.removesuffix(".") + ".")
    instead = (hint or "").removesuffix(".").removeprefix("instead: ")
    return f"{said} Instead: {instead}." if instead else said


def _not_served(done: subprocess.CompletedProcess[str], work: Path) -> Attempt:
    error = json.loads(done.stdout)["error"]
    if error["code"].startswith("unsupported"):
        return Attempt("refused", _sentence(error["message"], error["hint"]))
    if _stock_answer(work / "float32", prompt(PROMPT)) is None:
        return Attempt("stock fails")
    return Attempt("fails", _sentence(error["message"], error["hint"]))


def _stock_answer(model: Path, ids: Sequence[int]) -> list[int] | None:
    """The answer of SGLang without an INT2 cache; `None` where it does not start."""
    command = [sys.executable, "-c", STOCK, str(model), str(_free_port()), json.dumps(list(ids))]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    return list(json.loads(done.stdout.splitlines()[-1]))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _answer(port: int, ids: Sequence[int]) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    body = json.dumps({"input_ids": list(ids), "sampling_params": sampling}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        found: dict[str, Any] = json.load(response)
    return list(found["output_ids"])


STOCK = f"""
import json, sys
import oscar_zoo.models.torchvision_ops
from sglang import Engine
engine = Engine(model_path=sys.argv[1], device="cpu", dtype="float32", disable_cuda_graph=True,
                max_total_tokens=4096, port=int(sys.argv[2]), log_level="error")
sampling = dict(temperature=0, max_new_tokens={NEW}, ignore_eos=True)
(answer,) = engine.generate(input_ids=[json.loads(sys.argv[3])], sampling_params=sampling)
engine.shutdown()
print(json.dumps(answer["output_ids"]))
"""
"""The same model without an INT2 cache."""
