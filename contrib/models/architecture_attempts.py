"""What works with the small models of `architectures`: `compute`, `eval`, and a server.

Every attempt ends in one word and, where something does not work, the sentence that a user gets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from architectures import write_architecture, write_config
from engines import environment
from tiny_models import EXAMPLE

from oscar_zoo.engines.sglang.launch.plan import free_port
from oscar_zoo.engines.sglang.refusals import TEXT_ONLY
from oscar_zoo.engines.sglang.sizing import device_flags

Outcome = Literal["works", "refused", "fails", "stock fails", "stock differs", "not tried"]

TEXT = EXAMPLE.parents[1] / "text" / "calibration.txt"
HELD_OUT = TEXT.with_name("validation.txt")
LONG = 500
"""Tokens of a prompt that the windows do not hold."""


STOCK = """
import json, os, sys
import oscar_zoo.models.torchvision_ops
from sglang import Engine
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree
given = json.loads(sys.argv[1])
arguments = prepare_server_args(given["flags"])
if given["text_only"]:  # these models have images unless told otherwise, which no flag does
    object.__setattr__(arguments, "enable_multimodal", False)  # 0.5.17 has them read-only
engine = Engine(server_args=arguments)
ids, answer = given["ids"], given["answer"]
(found,) = engine.generate(
    input_ids=[ids + answer], sampling_params=dict(temperature=0, max_new_tokens=1),
    return_logprob=True, logprob_start_len=len(ids) - 1, top_logprobs_num=1,
)
told = found["meta_info"]
own = told["input_token_logprobs"][-len(answer):] if answer else []
best = told["input_top_logprobs"][-len(answer):] if answer else []
assert [one[1] for one in own] == answer
print(json.dumps([first[0][0] - one[0] for first, one in zip(best, own)]), flush=True)
kill_process_tree(os.getpid(), include_parent=False)
os._exit(0)  # some engines fail while they end
"""
"""The same model without an INT2 cache."""


@dataclass(frozen=True)
class Place:
    """A device, and what an attempt there looks like.

    Attributes:
        device: what computes and serves.
        dtype: of the weights that are served.
        flags: of SGLang, beside those that `oscar-zoo serve` sets.
        stock_flags: more of them for SGLang without an INT2 cache; the first that it starts with.
        tie: two tokens whose logits differ by less may change places.
        tie_of_spread: the same, as a share of the standard deviation of the logits.
        start_seconds: how long a server may take to be ready.
    """

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    flags: tuple[str, ...]
    stock_flags: tuple[tuple[str, ...], ...] = ((),)
    tie: float = 0.0
    tie_of_spread: float = 0.0
    start_seconds: int = 400

    def given(self, flags: tuple[str, ...], start_seconds: int) -> Place:
        """With more flags of SGLang, which win over those here."""
        return replace(self, flags=(*self.flags, *flags), start_seconds=start_seconds)

    def state(self, work: Path) -> dict[str, str]:
        """Variables of a command line that keeps what it knows in `work`.

        On a GPU the cache is the user's, because compiled kernels are in it.
        """
        own = ("STATE", "DATA") if self.device == "cuda" else ("STATE", "DATA", "CACHE")
        folders = {f"OSCAR_ZOO_{kind}": str(work / kind.lower()) for kind in own}
        return {**os.environ, **folders, "HF_HUB_OFFLINE": "1"}

    def stock(self) -> dict[str, str]:
        """Variables of SGLang without an INT2 cache."""
        alone = {"SGLANG_PLUGINS": "none"}
        return {**os.environ, **alone} if self.device == "cuda" else environment(**alone)


CPU = Place(
    "cpu",
    "float32",
    ("--dtype=float32", "--disable-cuda-graph", "--max-total-tokens=4096"),
    tie=0.03,
)
GPU = Place(
    "cuda",
    "bfloat16",
    (
        # Servers start side by side. SGLang compares the free memory before and after it loads a
        # model, and a small share would be less than what the others take meanwhile. So the share
        # is large, and what is made of it is bounded by the other flags.
        "--mem-fraction-static=0.5",
        "--max-total-tokens=16384",
        "--max-running-requests=8",
        "--max-mamba-cache-size=64",
        "--cuda-graph-max-bs-decode=8",
    ),
    # Triton's backend knows windows, sinks and caps, and nothing is compiled for it beforehand, but
    # SGLang refuses it where the first layer has no attention.
    stock_flags=(("--attention-backend=triton",), ("--attention-backend=flashinfer",)),
    # In bfloat16 a logit of these models moves by a few hundredths of the spread between two ways
    # to compute it. The best of 2048 random tokens leads the second by 0.3 of the spread on the
    # average, and any other token lies 3.5 behind: a wrong cache shows within a few tokens.
    tie_of_spread=0.15,
    start_seconds=200,
)


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
    said = re.sub(r"^(model|served) \(\w+\) ", "it ", message.removesuffix(".") + ".")
    said = re.sub(r"^oscar-zoo cannot serve \w+ \(\w+\) on a CPU: ", "", said)
    said = re.sub(r"\bmodel \(\w+\) ", "it ", said)
    # of such a small model these figures mean nothing
    said = re.sub(r"\d+ bytes (per token and layer) in place of \d+", r"fewer bytes \1", said)
    instead = (hint or "").removesuffix(".").removeprefix("instead: ")
    instead = re.sub(r"^(.* oscar-zoo info) \S+$", r"\1 NAME", instead)
    return f"{said} Instead: {instead}." if instead else said


def _not_served(done: subprocess.CompletedProcess[str], model: Path, place: Place) -> Attempt:
    error = json.loads(done.stdout)["error"]
    if error["code"].startswith("unsupported"):
        return Attempt("refused", sentence(error["message"], error["hint"]))
    if stock_gaps(model, prompt(PROMPT), [], place) is None:
        return Attempt("stock fails")
    return Attempt("fails", sentence(error["message"], None))


PROMPT, NEW = 48, 16
"""Tokens of a prompt that the windows hold whole, and of an answer."""
ANSWER_SECONDS = 300


@dataclass(frozen=True)
class Gap:
    """How far the logit of a token lies below the best one, and the standard deviation of all."""

    gap: float
    spread: float


def prompt(tokens: int) -> list[int]:
    """Random tokens, none of them special."""
    draw = torch.Generator().manual_seed(5)
    return torch.randint(16, 2048, (tokens,), generator=draw).tolist()


def answer(port: int, ids: Sequence[int]) -> list[int]:
    """The greedy answer of a server on this machine."""
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    body = json.dumps({"input_ids": list(ids), "sampling_params": sampling}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
        found: dict[str, Any] = json.load(response)
    return list(found["output_ids"])


def gaps(model: Path, ids: Sequence[int], answered: Sequence[int], place: Place) -> list[Gap]:
    """What transformers thinks of every token of an answer, on the same device."""
    from oscar_zoo.models.loading import load_model

    loaded = load_model(str(model), device=place.device)
    seen = torch.tensor([[*ids, *answered]], device=loaded.device)
    with torch.inference_mode():
        logits = loaded.model(input_ids=seen, use_cache=False).logits[0, len(ids) - 1 : -1].float()
    return [
        Gap(float(row.max() - row[token]), float(row.std()))
        for row, token in zip(logits, answered, strict=True)
    ]


def stock_gaps(
    model: Path, ids: Sequence[int], answered: Sequence[int], place: Place
) -> list[float] | None:
    """What SGLang without an INT2 cache thinks of every token; `None` where it does not start."""
    flags = {"--model-path": model, "--port": free_port(), **device_flags(place.device)}
    words = [f"{name}={value}" for name, value in flags.items()]
    kind = json.loads((model / "config.json").read_bytes())["model_type"]
    asked = {"ids": list(ids), "answer": list(answered), "text_only": kind in TEXT_ONLY}
    for number, more in enumerate(place.stock_flags, 1):
        given = {"flags": [*words, *more, *place.flags], **asked}
        command = [sys.executable, "-c", STOCK, json.dumps(given)]
        with model.with_name(f"stock-{number}.log").open("w") as log:
            done = subprocess.run(
                command,
                env=place.stock(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )
        if done.returncode == 0:
            return list(json.loads(done.stdout.splitlines()[-1]))
    return None


def untied(found: Sequence[float], wanted: Sequence[Gap], place: Place) -> int | None:
    """The first token of an answer that is further from the best than a tie, or `None`.

    Args:
        found: gaps of the tokens, by whoever is asked.
        wanted: the same tokens in transformers, for the spread of their logits.
    """
    for at, (gap, one) in enumerate(zip(found, wanted, strict=True)):
        if not gap <= max(place.tie, place.tie_of_spread * one.spread):
            return at
    return None
