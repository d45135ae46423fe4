"""The program that holds one SGLang engine and streams the cases of an `OfflineJob` through it:
`python -m ... JOB.json`. That of vLLM is the same, with an engine that looks like SGLang's.

`bench/sides.py` starts it and reads the news that it appends to a file, one JSON object each: `up`
once, `progress`, one `case` per repeat of a case, `bulk` if there is one, and `done` or `error` at
the end. Times are taken here, where the tokens arrive.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oscar_zoo.artifact.specs import Count, Spec
from oscar_zoo.engines.sglang.compat import server_arguments

WARM_TOKENS = 8
"""New tokens of the request that runs before a case is timed."""
WARM_CONTEXT = 64
"""Tokens of the prompts that a warm-up has beside its long one."""
FOLLOW_UP = 64
"""Tokens that every turn of a conversation adds to the answer before it."""
PACE = 0.5
FACTS = (
    "attention_backend kv_cache_dtype dtype chunked_prefill_size mem_fraction_static tp_size device"
    " max_running_requests disable_radix_cache schedule_policy".split()
)


class Case(Spec):
    """`batch` requests at the same time, each with a prompt of `context` tokens."""

    batch: Count
    context: Count

    def __str__(self) -> str:
        return f"{self.batch} x {self.context:,}"


def warm_prompts(case: Case) -> tuple[int, ...]:
    """Tokens of the prompts of the warm-up of `case`: as many requests as it has, and only one of
    them as long. Code depends on lengths and on the number of requests, but not on how many are
    long."""
    return (case.context, *[min(WARM_CONTEXT, case.context)] * (case.batch - 1))


class Bulk(Spec):
    """Requests that are all sent at once, timed until the last one is answered. With several
    `turns`, each request continues as a conversation: when all are answered, every prompt is sent
    again with its completion and `FOLLOW_UP` new tokens behind it."""

    requests: Count
    context: Count
    new_tokens: Count
    turns: Count = 1

    def __str__(self) -> str:
        what = "requests" if self.turns == 1 else f"conversations of {self.turns} turns, each"
        return f"{self.requests:,} {what} of {self.context:,} and {self.new_tokens:,} tokens"

    def prompt(self, turn: int) -> int:
        return self.context + turn * (self.new_tokens + FOLLOW_UP)

    @property
    def longest(self) -> int:
        return self.prompt(self.turns - 1) + self.new_tokens

    @property
    def tokens(self) -> int:
        return self.requests * sum(
            self.prompt(turn) + self.new_tokens for turn in range(self.turns)
        )

    def warm(self, new_tokens: int) -> Bulk:
        """The warm-up before it, so that nothing is compiled while it is timed."""
        shorter = min(new_tokens, self.new_tokens)
        return self.model_copy(update={"requests": min(2, self.requests), "new_tokens": shorter})


class OfflineJob(Spec):
    """A whole run of one engine."""

    arguments: tuple[str, ...]  # command line of SGLang's server
    cases: tuple[Case, ...]  # in this order
    new_tokens: Count  # that every request generates
    news: str  # file the process appends one JSON object per line to
    repeats: Count = 1  # how often each case is timed, after one warm-up
    bulk: Bulk | None = None  # after the cases, if anything

    @property
    def warm_tokens(self) -> int:
        return min(WARM_TOKENS, self.new_tokens)

    def tokens(self, case: Case) -> int:
        warm_up = sum(warm_prompts(case)) + case.batch * self.warm_tokens
        return warm_up + case.batch * self.repeats * (case.context + self.new_tokens)

    @property
    def total_tokens(self) -> int:
        return sum(map(self.tokens, self.cases)) + self.bulk_tokens

    @property
    def bulk_tokens(self) -> int:
        if self.bulk is None:
            return 0
        return self.bulk.tokens + self.bulk.warm(self.warm_tokens).tokens


def main(open_engine: Callable[[Sequence[str]], Any] = server_arguments.open_engine) -> None:
    job = OfflineJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    with Path(job.news).open("a", encoding="utf-8") as out:

        def tell(**news: Any) -> None:
            out.write(json.dumps(news) + "\n")
            out.flush()

        try:
            _drive(job, tell, open_engine)
            tell(done=True)
        except Exception as error:  # the engine's own error types are not public
            tell(error=_one_line(error))
            raise SystemExit(1) from error


def _drive(job: OfflineJob, tell: Callable[..., None], open_engine: Callable[..., Any]) -> None:
    began = time.perf_counter()
    engine = open_engine(job.arguments)
    try:
        info = engine.get_server_info()
        state = (info.get("internal_states") or [{}])[0]
        tokens = int(info["max_total_num_tokens"])
        requests = int(state.get("effective_max_running_requests_per_dp") or 1 << 30)
        facts = {name: str(info[name]) for name in FACTS if info.get(name) is not None}
        tell(
            up=time.perf_counter() - began,
            capacity=tokens,
            engine=facts,
            **{info.get("engine", "sglang"): info["version"]},
        )
        bench = OfflineBench(engine, job, tell, tokens=tokens, requests=requests)
        for case in job.cases:
            bench.measure(case)
        if job.bulk is not None:
            tell(bulk=bench.bulk(job.bulk))
    finally:
        engine.shutdown()


class Reply:
    """One request: how many new tokens were there when, which, and what of its prompt was in the
    prefix cache."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.arrivals: list[tuple[float, int]] = []
        self.ids: list[int] = []
        self.cached = 0

    def take(self, part: dict[str, Any], seconds: float) -> int:
        """Read one part of the stream; how many tokens it adds, the first one those of the prompt,
        too."""
        meta, ids = part["meta_info"], part["output_ids"]
        count = int(meta["completion_tokens"])
        self.cached = int(meta.get("cached_tokens") or 0)
        # An engine streams all tokens so far, or with --incremental-streaming-output what is new.
        if len(ids) >= count:
            self.ids = ids  # of the engine, which may still write to it; the last part has a copy
        else:
            self.ids = [*self.ids, *ids]
        before = self.arrivals[-1][1] if self.arrivals else -len(self.prompt)
        if count <= max(before, 0):
            return 0
        self.arrivals.append((seconds, count))
        return count - before


class OfflineBench:
    """Cases through one engine, whose cache has room for `tokens` tokens, and which runs `requests`
    requests at a time; counts tokens for the progress."""

    def __init__(
        self, engine: Any, job: OfflineJob, tell: Callable[..., None], *, tokens: int, requests: int
    ) -> None:
        self._engine, self._job, self._tell = engine, job, tell
        self._tokens, self._requests = tokens, requests
        self._done, self._told = 0, 0.0

    def measure(self, case: Case) -> None:
        """Tell the `arrivals` of every request, once per repeat, after a warm-up of as many
        requests; or `refused` with the cause, which ends the case. Every repeat has prompts of its
        own, which are prefilled anew."""
        before, told = self._done, case.model_dump()
        try:
            self._check_room(case, self._job.new_tokens)
            longest = self._prompts(case.batch, case.context, "1")
            warm = [p[:length] for p, length in zip(longest, warm_prompts(case), strict=True)]
            self._send(warm, self._job.warm_tokens)
            for repeat in range(self._job.repeats):
                prompts = self._prompts(case.batch, case.context, f"2 {repeat}")
                replies = self._send(prompts, self._job.new_tokens)
                if not all(reply.arrivals for reply in replies):
                    raise _NoFigure("a request ended without a token")
                self._tell(case=told, arrivals=[reply.arrivals for reply in replies])
        except (_NoFigure, ValueError) as error:
            self._tell(case=told, refused=_why(error))
        self._done = before + self._job.tokens(case)
        self._tell(progress=self._done)

    def bulk(self, bulk: Bulk) -> dict[str, Any]:
        """`turns`, or `refused` with the cause. A turn has its `seconds`, from sending all requests
        to the last token of the last one, and the share `reused` of its prompts that came from the
        prefix cache."""
        try:
            last = Case(batch=1, context=bulk.longest - bulk.new_tokens)
            self._check_room(last, bulk.new_tokens)
            self._talk(bulk.warm(self._job.warm_tokens), "3")
            turns = self._talk(bulk, "4")
            short = sum(len(reply.ids) < bulk.new_tokens for replies in turns for reply in replies)
            if short:
                raise _NoFigure(f"{short} requests ended early")
            found: dict[str, Any] = {"turns": [_turn(replies) for replies in turns]}
        except (_NoFigure, ValueError) as error:
            found = {"refused": _why(error)}
        self._done = self._job.total_tokens
        self._tell(progress=self._done)
        return found

    def _check_room(self, case: Case, new_tokens: int) -> None:
        need = case.batch * (case.context + new_tokens)
        why = ""
        if need > self._tokens:
            why = f"needs {need:,} tokens, the cache has {self._tokens:,}"
        elif case.batch > self._requests:
            why = f"the engine runs at most {self._requests} requests at a time"
        if why:
            raise _NoFigure(why)

    def _talk(self, bulk: Bulk, seed: str) -> list[list[Reply]]:
        turns = [self._send(self._prompts(bulk.requests, bulk.context, seed), bulk.new_tokens)]
        for turn in range(1, bulk.turns):
            said = self._prompts(bulk.requests, FOLLOW_UP, f"{seed} {turn}")
            prompts = [
                [*before.prompt, *before.ids, *more]
                for before, more in zip(turns[-1], said, strict=True)
            ]
            turns.append(self._send(prompts, bulk.new_tokens))
        return turns

    def _prompts(self, number: int, length: int, seed: str) -> list[list[int]]:
        """Random ones, the same for every engine."""
        vocabulary = int(self._engine.tokenizer_manager.model_config.vocab_size)
        choice = random.Random(f"{number} x {length} {seed}")
        ids = range(min(10, vocabulary - 1), vocabulary)
        return [choice.choices(ids, k=length) for _ in range(number)]

    def _send(self, prompts: Sequence[list[int]], new_tokens: int) -> list[Reply]:
        """All at the same moment; returns when the last one has its answer."""
        replies = [Reply(prompt) for prompt in prompts]
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}

        async def one(reply: Reply, began: float) -> None:
            stream = await self._engine.async_generate(
                input_ids=reply.prompt, sampling_params=sampling, stream=True
            )
            async for part in stream:
                self._advance(reply.take(part, time.perf_counter() - began))

        async def all_at_once() -> None:
            began = time.perf_counter()
            await asyncio.gather(*(one(reply, began) for reply in replies))

        self._engine.loop.run_until_complete(all_at_once())
        return replies

    def _advance(self, tokens: int) -> None:
        self._done += tokens
        if time.monotonic() - self._told >= PACE:
            self._told = time.monotonic()
            self._tell(progress=self._done)


class _NoFigure(Exception):
    """Why there is nothing to tell; an engine that refuses a request raises a `ValueError`, for
    example where it is longer than its context."""


def _turn(replies: Sequence[Reply]) -> dict[str, float]:
    prompts = sum(len(reply.prompt) for reply in replies)
    return {
        "seconds": max(reply.arrivals[-1][0] for reply in replies),
        "reused": sum(reply.cached for reply in replies) / prompts,
    }


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, _NoFigure) else _one_line(error)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400].rstrip(".")
    ours = type(error).__module__.startswith("oscar_zoo.")
    return text if ours else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
