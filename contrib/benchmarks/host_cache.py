"""Prompts that come back from the host's memory: second visits after eviction, in one engine.

    python contrib/benchmarks/host_cache.py int2 [--tokens 100000] [-- FLAGS]
    python contrib/benchmarks/host_cache.py bf16
    python contrib/benchmarks/host_cache.py int2 --model FOLDER --tokens 4608 --visits 1000

`int2` is this cache with its pages on the host, `bf16` stock SGLang with its own, on the shape of
`--model` in a pool that holds two of the prompts; weights are those of the folder, or random. Lines
of JSON:

* seconds until the first token of a first visit, and of a second one after the prompt left the GPU,
  with how many tokens came back;
* what 400 steps of another request lose to a visit whose prompt comes back (`reload`), and to the
  same visit while its prompt is on the GPU (`hit`), which any engine has: medians of some rounds
  behind a first one, whose mixed steps are the first of the server.
  The difference is the share of the host cache. Both visits end in other tokens than the first, so
  that as many are prefilled.

With `--visits` come instead that many random ones to shorter prompts, twenty times what the pool
holds, after a first one to each. Answers are compared with those of a server without the host
cache, a first visit with a first, the first token of a hit with that of a hit: log-probabilities
may differ by rounding, up to the first token that does. The line says what differed, how much
memory the server took between the middle and the end, and whether all passed, as does the exit
status. FLAGS go to SGLang.
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
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import psutil

PAGE, STEPS, ENDING, ROWS = 64, 400, 320, 16
HELD, GROUP = 24, 20
"""Short prompts that the pool holds, and of them as many as have no ring any more in a second
round: more than there are rows."""
NEW = 8
TEXT = Path(__file__).resolve().parents[2] / "examples/text/validation.txt"
ROUNDING = 0.2
"""Nats by which log-probabilities may differ: other batches have other sums, which change codes."""
GROWTH_MB = 128
Visit = tuple[int, int, list[float], list[int]]
"""Which prompt, tokens of it from a cache, and log-probabilities and tokens of the answer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("side", choices=("int2", "bf16"))
    parser.add_argument("--model", default="Qwen3-8B", help="a name of the zoo, or a folder")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--visits", type=int, default=0)
    parser.add_argument("--host", type=int, default=20, help="GB of the host's memory")
    parser.add_argument("--alone", action="store_true", help="without a host")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    args.flags = words[at + 1 :]
    args.pool = (2 * args.tokens + (0 if args.visits else 8192)) // PAGE * PAGE
    side = {"side": args.side, "host": not args.alone, "tokens": args.tokens}
    with tempfile.TemporaryDirectory() as work:
        args.work = Path(work)
        draw = written(args)
        if not args.visits:
            with_engine(args, lambda engine: measured(engine, args, draw, side))
            return
        prompts = [draw(args.pool // HELD // PAGE * PAGE) for _ in range(20 * HELD)]
        began = time.perf_counter()
        visits, grew = with_engine(args, lambda engine: visited(engine, args, prompts))
        seconds = time.perf_counter() - began
        args.alone = True
        known = with_engine(args, lambda engine: references(engine, prompts))
    verdict = judged(visits, known)
    passed = not verdict["wrong"] and verdict["hits"] > 0 and grew < GROWTH_MB
    tell(**side, what="visits", **verdict, grew_mb=grew, seconds=round(seconds), passed=passed)
    sys.exit(not passed)


def written(args: Any) -> Callable[[int], list[int]]:
    """Write model and artifact; what draws a prompt of so many tokens: of a text, or random."""
    from oscar_zoo.evaluate.bench import measuring, sides
    from oscar_zoo.observer import SILENT
    from oscar_zoo.registry import targets

    choice, folder = targets.parse_model(args.model, SILENT), args.work / "model"
    geometry = measuring._write_model(choice, folder, 1 << 17)
    sides.write_rotations(args.work / "rotations", geometry)
    args.weights = "dummy"
    for weights in Path(choice.source).glob("*.safetensors*"):
        (folder / weights.name).symlink_to(weights.resolve())
        args.weights = "auto"
    source, ids = random.Random(7), list[int]()
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text()).ids
    most = int(json.loads((folder / "config.json").read_text())["vocab_size"])

    def draw(tokens: int) -> list[int]:
        if tokens < len(ids):
            at = source.randrange(len(ids) - tokens)
            return ids[at : at + tokens]
        return [source.randrange(100, most - 100) for _ in range(tokens)]

    return draw


def with_engine(args: Any, use: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    from oscar_zoo.engines.sglang.compat.server_arguments import open_engine

    words = ["--model-path", str(args.work / "model"), f"--load-format={args.weights}"]
    words += [f"--max-total-tokens={args.pool}", f"--page-size={PAGE}", "--skip-tokenizer-init"]
    words += [f"--max-running-requests={ROWS}", "--enable-cache-report"]
    if not args.alone:
        words += ["--enable-hierarchical-cache", f"--hicache-size={args.host}"]
    if args.side == "int2":
        words += ["--kv-cache-dtype=int2", f"--oscar-rotation-path={args.work / 'rotations'}"]
    else:
        os.environ["SGLANG_PLUGINS"] = "none"
    engine = open_engine([*words, *args.flags])
    try:
        return asyncio.run(use(engine))
    finally:
        engine.shutdown()


async def asked(engine: Any, ids: list[int], new: int = 1) -> tuple[list[float], dict[str, Any]]:
    """Seconds at which tokens of an answer came, and the answer."""
    began, stamps, last = time.perf_counter(), list[float](), dict[str, Any]()
    rule = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    parts = await engine.async_generate(
        input_ids=ids, sampling_params=rule, stream=True, return_logprob=new == NEW
    )
    async for part in parts:
        last = part
        stamps.append(time.perf_counter() - began)
    return stamps, last


def cached(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"].get("cached_tokens") or 0)


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


async def measured(
    engine: Any, args: Any, draw: Callable[[int], list[int]], side: dict[str, Any]
) -> None:
    short = min(2048, args.tokens // 2)
    wanted, *others = (draw(args.tokens) for _ in range(3))
    for prompt in (draw(short), others[0]):  # kernels are compiled
        await asked(engine, prompt, NEW)
    stamps, first = await asked(engine, wanted, NEW)
    tell(**side, what="first visit", first_s=round(stamps[0], 3), cached=cached(first))
    if args.alone:
        return
    for other in others[::-1]:
        await asked(engine, other)
    await asyncio.sleep(2)
    stamps, again = await asked(engine, wanted, NEW)
    same = again["output_ids"] == first["output_ids"]
    told = {"first_s": round(stamps[0], 3), "cached": cached(again), "same": same}
    tell(**side, what="second visit", **told)

    async def steps(visit: bool) -> tuple[float, float, float]:
        """Milliseconds of all steps, the longest, and those of the visit."""
        stepping = asyncio.create_task(asked(engine, draw(short), STEPS))
        await asyncio.sleep(STEPS * usual / 4)
        came = 0.0
        if visit:
            first, answer = await asked(engine, [*wanted[:-ENDING], *draw(ENDING)])
            came, found[:] = first[0], [*found, cached(answer)]
        stamps, _ = await stepping
        longest = max(later - sooner for sooner, later in itertools.pairwise(stamps))
        return 1e3 * (stamps[-1] - stamps[0]), 1e3 * longest, 1e3 * came

    found, usual = list[int](), 0.0
    await steps(visit=False)
    kinds: dict[str, list[tuple[float, float, float]]] = {"alone": [], "reload": [], "hit": []}
    for _ in range(1 + args.rounds):
        for other in others:
            await asked(engine, other)
        await asyncio.sleep(1)
        for kind, runs in kinds.items():
            runs.append(await steps(visit=kind != "alone"))
            usual = kinds["alone"][0][0] / 1e3 / STEPS
    middle = {
        kind: [statistics.median(column) for column in zip(*runs[1:], strict=True)]
        for kind, runs in kinds.items()
    }
    alone = middle.pop("alone")
    lost = {kind: figures[0] - alone[0] for kind, figures in middle.items()}
    tell(
        **side, what="steps of another", step_ms=round(alone[0] / (STEPS - 1), 2), cached=found,
        **{f"{kind}_lost_ms": round(value, 1) for kind, value in lost.items()},
        **{f"{kind}_longest_ms": round(figures[1], 1) for kind, figures in middle.items()},
        **{f"{kind}_first_ms": round(figures[2], 1) for kind, figures in middle.items()},
        share=round((lost["reload"] - lost["hit"]) / alone[0], 4),
        spread_ms=[round(run[0] - alone[0], 1) for runs in kinds.values() for run in runs],
    )  # fmt: skip


async def visit(engine: Any, prompts: list[list[int]], at: int) -> Visit:
    _, answer = await asked(engine, prompts[at], NEW)
    values = [float(one[0]) for one in answer["meta_info"]["output_token_logprobs"]]
    return at, cached(answer), values, list(answer["output_ids"])


async def visited(engine: Any, args: Any, prompts: list[list[int]]) -> tuple[list[Visit], int]:
    """Random visits, eight at a time, and megabytes that the server took in their second half."""
    source, gate = random.Random(11), asyncio.Semaphore(8)

    async def one(at: int) -> Visit:
        async with gate:
            return await visit(engine, prompts, at)

    async def some(order: Iterable[int]) -> tuple[list[Visit], int]:
        found = await asyncio.gather(*map(one, order))
        family = psutil.Process().children(recursive=True)
        return found, sum(process.memory_info().rss for process in family) >> 20

    def random_visits(number: int) -> Iterable[int]:
        return (source.randrange(len(prompts)) for _ in range(number))

    first, _ = await some(range(len(prompts)))
    second, before = await some(random_visits(args.visits // 2))
    third, after = await some(random_visits(args.visits - args.visits // 2))
    return [*first, *second, *third], after - before


async def references(engine: Any, prompts: list[list[int]]) -> list[Visit]:
    """A first visit to each prompt, and a hit, while the device still holds it."""
    found = list[Visit]()
    for first in range(0, len(prompts), GROUP):
        order = 2 * [*range(first, min(first + GROUP, len(prompts)))]
        for place in range(0, len(order), 4):
            some = (visit(engine, prompts, at) for at in order[place : place + 4])
            found += await asyncio.gather(*some)
    return found


def judged(visits: list[Visit], known: list[Visit]) -> dict[str, Any]:
    """What the visits found, and how many differ by more than rounding from a known one with as
    many cached tokens. Of a hit that is the first token: where the end of its prompt lies on the
    device, later ones read that of the first visit. A hit that reaches further, on the ring of a
    request that has just ended, is compared with nothing."""
    answers = {(at, cached): (values, ids) for at, cached, values, ids in known}
    differ, wrong, unknown, largest = 0, 0, 0, 0.0
    for at, cached, values, ids in visits:
        if (at, cached) not in answers:
            unknown += 1
            continue
        wanted, tokens = answers[at, cached]
        ids, tokens = (of[: 1 if cached else NEW] for of in (ids, tokens))
        pairs = enumerate(zip(ids, tokens, strict=True))
        read = 1 + next((place for place, (a, b) in pairs if a != b), len(ids) - 1)
        change = max(abs(a - b) for a, b in zip(values[:read], wanted[:read], strict=True))
        differ, largest = differ + (ids != tokens), max(largest, change)
        wrong += change > ROUNDING
    hits = sum(cached > 0 for _, cached, *_ in visits)
    return {
        "number": len(visits), "hits": hits, "unknown": unknown, "differ": differ, "wrong": wrong,
        "largest_nats": round(largest, 4),
    }  # fmt: skip


if __name__ == "__main__":
    main()
