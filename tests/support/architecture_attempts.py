"""What works with the small models of `architectures`: `compute`, `eval`, and a server.

Every attempt ends in one word and, where something does not work, the sentence that a user gets.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from architecture_answers import NEW, PROMPT, answer, gaps, prompt, stock_gaps, untied
from architecture_places import CPU, Place
from architectures import write_architecture, write_config
from random_qwen3 import EXAMPLE

from oscar_zoo.engines.sglang.launch.plan import free_port

Outcome = Literal["works", "refused", "fails", "stock fails", "stock differs", "not tried"]

TEXT = EXAMPLE.parents[1] / "text" / "calibration.txt"
HELD_OUT = TEXT.with_name("validation.txt")
LONG = 500
"""Tokens of a prompt that the windows do not hold."""


@dataclass(frozen=True)
class Attempt:
    """What came of it.

    Attributes:
        outcome: `refused` by a sentence of ours; `stock fails` where SGLang does not start there
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
    from oscar_zoo import evaluate_artifact
    from oscar_zoo.errors import OscarZooError

    computed = compute(name, work)
    if computed.outcome != "works":
        return computed, computed
    try:
        report = evaluate_artifact(
            work / "rotation",
            model=work / "model",
            tasks=["perplexity"],
            data=str(HELD_OUT),
            windows=1,
            length=512,
            device="cpu",
        )
    except OscarZooError as error:
        return computed, Attempt("refused", sentence(error.message, error.hint))
    assert all(row.perplexity is not None and row.perplexity < 1e6 for row in report.rows)
    return computed, Attempt("works")


def compute(name: str, work: Path, place: Place = CPU) -> Attempt:
    """Write `model` into `work`, and a `rotation` for it."""
    from oscar_zoo import compute_artifact
    from oscar_zoo.errors import OscarZooError

    shutil.rmtree(work, ignore_errors=True)
    model = work / "model"
    try:
        write_config(name, model)
        compute_artifact(
            _with_weights(name, model),
            calib_data=TEXT,
            calib_tokens=1024,
            seq_len=512,
            method="oscar",
            output=work / "rotation",
            device=place.device,
        )
    except OscarZooError as error:
        return Attempt("refused", sentence(error.message, error.hint))
    return Attempt("works")


def serve(name: str, work: Path, place: Place = CPU) -> Attempt:
    """Serve the rotation that `compute` left in `work`, and compare tokens.

    The answer to a short prompt must be that of transformers, because the windows hold all of it.
    The answer to a long one must come.
    """
    served = write_architecture(name, work / "served", dtype=place.dtype)
    command = [sys.executable, "-m", "oscar_zoo", "serve", str(work / "rotation")]
    command += ["--model", str(served), "--device", place.device, "--detach", "--json"]
    port = free_port()
    wait = ["--port", str(port), "--timeout", str(place.start_seconds), "--", *place.flags]
    done = subprocess.run(
        [*command, *wait], env=place.state(work), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return _not_served(done, served, place)
    try:
        short = answer(port, prompt(PROMPT))
        long = answer(port, prompt(LONG))
    finally:
        stop(work, place)
    if len(long) != NEW:
        return Attempt("fails", f"The answer to a long prompt has {len(long)} tokens.")
    return _compared(served, short, place)


def refused_by_server(work: Path) -> Attempt | None:
    """What `serve` says of the `model` in `work` by its `config.json`; `None` if it is served."""
    from oscar_zoo.engines.sglang.refusals import check_config
    from oscar_zoo.errors import UnsupportedModel
    from oscar_zoo.models.config_file import ConfigFile

    try:
        check_config(ConfigFile.of_folder(work / "model"), "model")
    except UnsupportedModel as error:
        return Attempt("refused", sentence(error.message, error.hint))
    return None


def stop(work: Path, place: Place) -> None:
    """End the server whose state is in `work`, if there is one."""
    command = [sys.executable, "-m", "oscar_zoo", "stop", "--now"]
    subprocess.run(command, env=place.state(work), capture_output=True, check=False)


def _compared(model: Path, short: list[int], place: Place) -> Attempt:
    wanted = gaps(model, prompt(PROMPT), short, place)
    at = untied([one.gap for one in wanted], wanted, place)
    if at is None:
        return Attempt("works")
    stock = stock_gaps(model, prompt(PROMPT), short, place)
    if stock is not None and untied(stock, wanted, place) is None:
        return Attempt("stock differs")
    return Attempt("fails", f"Token {at} of the answer is not that of transformers.")


def _with_weights(name: str, model: Path) -> Path:
    """The checkpoint, or `model` as it is where its configuration alone is refused."""
    from oscar_zoo.models.model_source import inspect_model

    inspect_model(str(model))
    return write_architecture(name, model)


def sentence(message: str, hint: str | None) -> str:
    """What a user is told, with `it` in place of the folder and the type of the model."""
    said = re.sub(r"^model \(\w+\) ", "it ", message.removesuffix(".") + ".")
    said = re.sub(r"\bmodel \(\w+\) ", "it ", said)
    instead = (hint or "").removesuffix(".").removeprefix("instead: ")
    return f"{said} Instead: {instead}." if instead else said


def _not_served(done: subprocess.CompletedProcess[str], model: Path, place: Place) -> Attempt:
    error = json.loads(done.stdout)["error"]
    if error["code"].startswith("unsupported"):
        return Attempt("refused", sentence(error["message"], error["hint"]))
    if stock_gaps(model, prompt(PROMPT), [], place) is None:
        return Attempt("stock fails")
    return Attempt("fails", sentence(error["message"], None))
