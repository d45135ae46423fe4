"""Prompts that come back from the host's memory: second visits after eviction, in one engine.

    python contrib/benchmarks/host_cache.py int2 [--tokens 100000] [--visits 200] [-- FLAGS]
    python contrib/benchmarks/host_cache.py bf16

`int2` is this cache with its pages on the host, `bf16` stock SGLang with its own, on the shape of
`--model` with random weights, in a pool that holds two of the prompts. A line of JSON each: seconds
until the first token of a first visit, and of a second one after the prompt left the GPU, with how
many tokens came back; milliseconds of a step of another request while one comes back, and before.
With `--visits` come that many random ones to shorter prompts, twenty times what the pool holds: how
many gave other tokens than the first visit. FLAGS go to SGLang.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAGE, STEPS = 64, 400


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("side", choices=("int2", "bf16"))
    parser.add_argument("--model", default="Qwen3-8B", help="a name of the zoo, or a folder")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--visits", type=int, default=0)
    parser.add_argument("--host", type=int, default=20, help="GB of the host's memory")
    parser.add_argument("--alone", action="store_true", help="without a host")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    args.flags = words[at + 1 :]
    with tempfile.TemporaryDirectory() as work:
        engine = opened(Path(work), args)
        try:
            asyncio.run(measured(engine, args))
        finally:
            engine.shutdown()


def opened(work: Path, args: Any) -> Any:
    from oscar_zoo.engines.sglang.compat.server_arguments import open_engine
    from oscar_zoo.evaluate.bench import measuring, sides
    from oscar_zoo.observer import SILENT
    from oscar_zoo.registry import targets

    choice = targets.parse_model(args.model, SILENT)
    geometry = measuring._write_model(choice, work / "model", 1 << 17)
    sides.write_rotations(work / "rotations", geometry)
    pool = 2 * args.tokens + 8192
    words = ["--model-path", f"{work / 'model'}", "--load-format=dummy", "--skip-tokenizer-init"]
    words += [f"--max-total-tokens={pool // PAGE * PAGE}", f"--page-size={PAGE}"]
    words += ["--max-running-requests=16", "--enable-cache-report"]
    if not args.alone:
        words += ["--enable-hierarchical-cache", f"--hicache-size={args.host}"]
    if args.side == "int2":
        words += ["--kv-cache-dtype=int2", f"--oscar-rotation-path={work / 'rotations'}"]
    else:
        os.environ["SGLANG_PLUGINS"] = "none"
    return open_engine([*words, *args.flags])


async def asked(engine: Any, ids: list[int], new: int = 1) -> tuple[list[float], int, list[int]]:
    """Seconds at which tokens of an answer came, tokens of the prompt from a cache, the answer."""
    began, stamps, last = time.perf_counter(), list[float](), dict[str, Any]()
    rule = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    async for part in await engine.async_generate(input_ids=ids, sampling_params=rule, stream=True):
        last = part
        stamps.append(time.perf_counter() - began)
    return stamps, int(last["meta_info"].get("cached_tokens") or 0), list(last["output_ids"])


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


async def measured(engine: Any, args: Any) -> None:
    source = random.Random(7)

    def prompt(tokens: int) -> list[int]:
        return [
            source.randrange(100, 100_000 if args.tokens > 50_000 else 400) for _ in range(tokens)
        ]

    short = min(2048, args.tokens // 2)
    for tokens in (short, args.tokens):  # kernels are compiled
        await asked(engine, prompt(tokens), 8)
    wanted, others = prompt(args.tokens), [prompt(args.tokens) for _ in range(3)]
    side = {"side": args.side, "host": not args.alone, "tokens": args.tokens}
    stamps, cached, answer = await asked(engine, wanted, 8)
    tell(**side, what="first visit", first_s=round(stamps[0], 3), cached=cached)
    for other in others:
        await asked(engine, other)
    await asyncio.sleep(2)
    stamps, cached, again = await asked(engine, wanted, 8)
    tell(
        **side,
        what="second visit",
        first_s=round(stamps[0], 3),
        cached=cached,
        same=again == answer,
    )
    if args.alone:
        return
    for other in others[:2]:
        await asked(engine, other)
    await asyncio.sleep(1)
    stepping = asyncio.create_task(asked(engine, prompt(short), STEPS))
    await asyncio.sleep(1)
    loaded = asyncio.create_task(asked(engine, wanted))
    stamps, _, _ = await stepping
    (came, cached, _) = await loaded
    gaps = [1e3 * (b - a) for a, b in itertools.pairwise(stamps)]
    usual = statistics.median(gaps)
    tell(
        **side, what="steps of another", alone_ms=round(usual, 2), longest_ms=round(max(gaps), 2),
        loading_s=round(came[0], 3), cached=cached,
        lost_ms=round(sum(gap - usual for gap in gaps if gap > 2 * usual), 1),
    )  # fmt: skip
    if args.visits:
        await visits(
            engine, args, [prompt(short) for _ in range(20 * 2 * args.tokens // short)], side
        )


async def visits(engine: Any, args: Any, prompts: list[list[int]], side: dict[str, Any]) -> None:
    """Random visits, eight at a time."""
    source, number = random.Random(11), len(prompts)
    known, found, differ, gate = dict[int, list[int]](), [0, 0], 0, asyncio.Semaphore(8)

    async def visit(at: int) -> None:
        nonlocal differ
        async with gate:
            _, cached, answer = await asked(engine, prompts[at], 8)
        found[0] += 1
        found[1] += cached > 0
        differ += known.setdefault(at, answer) != answer

    began = time.perf_counter()
    order = [*range(number), *(source.randrange(number) for _ in range(args.visits))]
    await asyncio.gather(*map(visit, order))
    seconds = round(time.perf_counter() - began, 1)
    tell(**side, what="visits", number=found[0], hits=found[1], differ=differ, seconds=seconds)


if __name__ == "__main__":
    main()
