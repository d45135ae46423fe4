"""Decode steps of stock vLLM on a GPU: the INT2 cache beside a stock backend, random weights.

    python contrib/benchmarks/vllm_steps.py int2,FLASH_ATTN --cases 1x8000,16x20000,1x100000

Each side runs in a process of its own, one after the other, on the shape of `--model`. Of each
case, BATCHxCONTEXT, it tells the milliseconds of a step (the median of those of 100 tokens, without
the first quarter), the seconds until every request has its first token, and for INT2 the
microseconds of host time that our part of a step takes in front of the pass. A side called NAME:fp8
has an FP8 cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEW = 100
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sides", help="int2, and names of --attention-backend")
    parser.add_argument("--cases", default="1x8000,16x20000,1x100000")
    parser.add_argument("--model", default="Qwen3-8B", help="a name of the zoo, or a folder")
    parser.add_argument("--requests", type=int, default=64, help="--max-num-seqs of every side")
    parser.add_argument("--in", dest="place", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.place is not None:
        print(json.dumps(measure(args.sides, args.place, args.cases, args.requests)))
        return
    with tempfile.TemporaryDirectory() as work:
        write(Path(work), args.model)
        for side in args.sides.split(","):
            told = [sys.executable, "-P", __file__, side, "--in", work]
            told += ["--cases", args.cases, "--requests", str(args.requests)]
            done = subprocess.run(told, stdout=subprocess.PIPE, text=True, check=True)
            print(done.stdout.splitlines()[-1], flush=True)


def write(folder: Path, model: str) -> None:
    """A model without weights, and rotations for it."""
    from oscar_zoo.evaluate.bench import measuring, sides
    from oscar_zoo.observer import SILENT
    from oscar_zoo.registry import targets

    choice = targets.parse_model(model, SILENT)
    geometry = measuring._write_model(choice, folder / "model", 1 << 17)
    sides.write_rotations(folder / "rotations", geometry)


def measure(side: str, folder: Path, cases: str, requests: int) -> dict[str, Any]:
    os.environ |= QUIET | {"OSCAR_INT2_ROTATION_PATH": str(folder / "rotations")}
    import torch
    from vllm import LLM, SamplingParams

    name, _, cache = side.partition(":")
    own: dict[str, Any] = {"attention_backend": name, "kv_cache_dtype": cache or "auto"}
    if name == "int2":
        own = {"kv_cache_dtype": "oscar_int2"}
    engine: Any = LLM(
        model=str(folder / "model"), load_format="dummy", skip_tokenizer_init=True, seed=0,
        max_model_len=1 << 17, max_num_seqs=requests, enable_prefix_caching=False, **own,
    ).llm_engine  # fmt: skip
    sizes = engine.vllm_config.cache_config
    builds = timed() if name == "int2" else []
    found: dict[str, Any] = {"side": side, "tokens": sizes.num_gpu_blocks * sizes.block_size}
    rule = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    for case in ("1x300", *cases.split(",")):  # the first one warms up
        batch, context = map(int, case.split("x"))
        prompts = torch.randint(
            100, 100_000, (batch, context), generator=torch.Generator()
        ).tolist()
        builds.clear()
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{case}-{number}", {"prompt_token_ids": prompt}, rule)
        seen, stamps = set[str](), list[float]()
        while engine.has_unfinished_requests():
            seen |= {one.request_id for one in engine.step() if one.outputs[0].token_ids}
            if len(seen) == batch:
                stamps.append(time.perf_counter())
        gaps = [b - a for a, b in itertools.pairwise(stamps)]
        step = statistics.median(gaps[len(gaps) // 4 : -4])
        found[case] = {"step_ms": round(1e3 * step, 2), "first_s": round(stamps[0] - began, 2)}
        if builds:
            found[case]["build_us"] = round(1e6 * statistics.median(builds[len(builds) // 2 :]))
    return found


def timed() -> list[float]:
    """Seconds of every step's `build`, as they come."""
    from oscar_zoo.engines.vllm.backend import Int2Builder

    stock, took = Int2Builder.build, list[float]()

    def build(self: Any, *given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        made = stock(self, *given, **named)
        took.append(time.perf_counter() - began)
        return made

    Int2Builder.build = build
    return took


if __name__ == "__main__":
    main()
