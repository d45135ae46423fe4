"""The program that holds one SGLang engine and streams the cases of a `Job` through it: `python -m ... JOB.json`.

`run.py` starts it and reads the news it appends to a file, one JSON object per line: `up` once, `progress`, one `case`
per case, `bulk` if there is one, and `done` or `error` at the end. Times are taken here, where the tokens arrive.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oscar_zoo.sglang_plugin.bench.job import Bulk, Case, Job

PACE = 0.5
"""Seconds between two reports of progress."""
FACTS = ("attention_backend", "dtype", "chunked_prefill_size", "mem_fraction_static", "tp_size", "device")
"""Settings of the engine that go into the report."""


def _main() -> None:
    job = Job.model_validate_json(Path(sys.argv[1]).read_bytes())
    with Path(job.news).open("a", encoding="utf-8") as out:

        def tell(**news: Any) -> None:
            out.write(json.dumps(news) + "\n")
            out.flush()

        try:
            _drive(job, tell)
            tell(done=True)
        except Exception as error:  # the engine's own error types are not public
            tell(error=_one_line(error))
            raise SystemExit(1) from error


def _drive(job: Job, tell: Callable[..., None]) -> None:
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # before the command line is read, which has our flags
    began = time.perf_counter()
    engine = sglang.Engine(server_args=prepare_server_args(list(job.arguments)))
    try:
        info = engine.get_server_info()
        state = (info.get("internal_states") or [{}])[0]
        room = Room(
            int(info["max_total_num_tokens"]), int(state.get("effective_max_running_requests_per_dp") or 1 << 30)
        )
        facts = {name: str(info[name]) for name in FACTS if info.get(name) is not None}
        tell(up=time.perf_counter() - began, sglang=str(sglang.__version__), capacity=room.tokens, engine=facts)
        bench = Bench(engine, job, tell)
        for case in job.cases:
            tell(case=case.model_dump(), **bench.measure(case, room))
        if job.bulk is not None:
            tell(bulk=bench.bulk(job.bulk, room))
    finally:
        engine.shutdown()


class Room:
    """What fits into the engine at once."""

    def __init__(self, tokens: int, requests: int) -> None:
        self.tokens = tokens
        self.requests = requests

    def shortage(self, case: Case, new_tokens: int) -> str | None:
        """Why `case` cannot run as one batch, or `None`."""
        need = case.batch * (case.context + new_tokens)
        if need > self.tokens:
            return f"needs {need:,} tokens, the cache has {self.tokens:,}"
        if case.batch > self.requests:
            return f"the engine runs at most {self.requests} requests at a time"
        return None


class Bench:
    """Cases through one engine; counts tokens for the progress."""

    def __init__(self, engine: Any, job: Job, tell: Callable[..., None]) -> None:
        self._engine = engine
        self._job = job
        self._tell = tell
        self._done = 0
        self._told = 0.0

    def measure(self, case: Case, room: Room) -> dict[str, Any]:
        """`arrivals` of every request after a warm-up of the same shape, or `refused` with the cause."""
        before = self._done
        refused, arrivals = room.shortage(case, self._job.new_tokens), []
        if refused is None:
            try:
                self._batch(case, self._job.warm_tokens, seed=1)
                arrivals = self._batch(case, self._job.new_tokens, seed=2)
            except ValueError as error:  # how the engine refuses a request, for example one beyond its context
                refused = _one_line(error)
        self._done = before + self._job.tokens(case)
        self._tell(progress=self._done)
        return {"arrivals": arrivals} if refused is None else {"refused": refused}

    def bulk(self, bulk: Bulk, room: Room) -> dict[str, Any]:
        """`seconds` from sending all requests to the last token of the last one, or `refused` with the cause."""
        one = Case(batch=1, context=bulk.context)
        refused, seconds = room.shortage(one, bulk.new_tokens), 0.0
        if refused is None:
            try:
                self._batch(bulk.warm, self._job.warm_tokens, seed=3)
                arrivals = self._batch(Case(batch=bulk.requests, context=bulk.context), bulk.new_tokens, seed=4)
                short = sum(not seen or seen[-1][1] < bulk.new_tokens for seen in arrivals)
                refused = f"{short} requests ended early" if short else None
                seconds = max((seen[-1][0] for seen in arrivals if seen), default=0.0)
            except ValueError as error:
                refused = _one_line(error)
        self._done = self._job.total_tokens
        self._tell(progress=self._done)
        return {"seconds": seconds} if refused is None else {"refused": refused}

    def _batch(self, case: Case, new_tokens: int, *, seed: int) -> list[list[tuple[float, int]]]:
        vocabulary = int(self._engine.tokenizer_manager.model_config.vocab_size)
        choice = random.Random(f"{case} {seed}")  # the same prompts for every engine
        ids = range(min(10, vocabulary - 1), vocabulary)
        prompts = [choice.choices(ids, k=case.context) for _ in range(case.batch)]
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]

        async def all_at_once() -> None:
            began = time.perf_counter()
            pairs = zip(prompts, arrivals, strict=True)
            await asyncio.gather(*(self._one(prompt, new_tokens, began, seen) for prompt, seen in pairs))

        self._engine.loop.run_until_complete(all_at_once())
        return arrivals

    async def _one(self, prompt: list[int], new_tokens: int, began: float, seen: list[tuple[float, int]]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        stream = await self._engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
        async for part in stream:
            now, count = time.perf_counter() - began, int(part["meta_info"]["completion_tokens"])
            before = seen[-1][1] if seen else -len(prompt)
            if count > max(before, 0):
                seen.append((now, count))
                self._advance(count - before)

    def _advance(self, tokens: int) -> None:
        self._done += tokens
        if time.monotonic() - self._told >= PACE:
            self._told = time.monotonic()
            self._tell(progress=self._done)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400].rstrip(".")
    return text if type(error).__module__.startswith("oscar_zoo.") else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    _main()
