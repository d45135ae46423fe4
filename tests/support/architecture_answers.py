"""Prompts for the small models of `architectures`, and who agrees with a greedy answer."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from architecture_places import Place

from oscar_zoo.engines.sglang.launch.plan import free_port
from oscar_zoo.engines.sglang.refusals import TEXT_ONLY
from oscar_zoo.engines.sglang.sizing import device_flags

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
