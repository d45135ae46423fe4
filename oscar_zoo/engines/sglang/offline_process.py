"""The program that holds one SGLang engine and streams the cases of an `OfflineJob` through it:
`python -m ... JOB.json`.

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
from dataclasses import dataclass, field
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
"""Seconds between two reports of progress."""
FACTS = (
    "attention_backend",
    "kv_cache_dtype",
    "dtype",
    "chunked_prefill_size",
    "mem_fraction_static",
    "tp_size",
    "device",
    "max_running_requests",
    "disable_radix_cache",
    "schedule_policy",
)
"""Settings of the engine that the report shows."""


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
        """Tokens of the prompt of turn 0, 1, ..."""
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
        smaller = {
            "requests": min(2, self.requests),
            "new_tokens": min(new_tokens, self.new_tokens),
        }
        return self.model_copy(update=smaller)


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
        """Tokens that go through the engine for `case`, its warm-up and all repeats included."""
        warm_up = sum(warm_prompts(case)) + case.batch * self.warm_tokens
        return warm_up + case.batch * self.repeats * (case.context + self.new_tokens)

    @property
    def total_tokens(self) -> int:
        return sum(map(self.tokens, self.cases)) + self.bulk_tokens

    @property
    def bulk_tokens(self) -> int:
        """Tokens that go through the engine for the bulk, warm-up included."""
        return (
            0 if self.bulk is None else self.bulk.tokens + self.bulk.warm(self.warm_tokens).tokens
        )


def _main() -> None:
    job = OfflineJob.model_validate_json(Path(sys.argv[1]).read_bytes())
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


def _drive(job: OfflineJob, tell: Callable[..., None]) -> None:
    began = time.perf_counter()
    engine = server_arguments.open_engine(job.arguments)
    try:
        info = engine.get_server_info()
        state = (info.get("internal_states") or [{}])[0]
        room = Room(
            int(info["max_total_num_tokens"]),
            int(state.get("effective_max_running_requests_per_dp") or 1 << 30),
        )
        facts = {name: str(info[name]) for name in FACTS if info.get(name) is not None}
        tell(
            up=time.perf_counter() - began,
            sglang=server_arguments.release(),
            capacity=room.tokens,
            engine=facts,
        )
        bench = OfflineBench(engine, job, tell)
        for case in job.cases:
            bench.measure(case, room)
        if job.bulk is not None:
            tell(bulk=bench.bulk(job.bulk, room))
    finally:
        engine.shutdown()


class Room:
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


@dataclass
class Reply:
    """One request: how many new tokens were there when, which, and what of its prompt was in the
    prefix cache."""

    prompt: list[int]
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    cached: int = 0

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
    """Cases through one engine; counts tokens for the progress."""

    def __init__(self, engine: Any, job: OfflineJob, tell: Callable[..., None]) -> None:
        self._engine = engine
        self._job = job
        self._tell = tell
        self._done = 0
        self._told = 0.0

    def measure(self, case: Case, room: Room) -> None:
        """Tell the `arrivals` of every request, once per repeat, after a warm-up of as many
        requests; or `refused` with the cause, which ends the case. Every repeat has prompts of its
        own, which are prefilled anew."""
        before = self._done
        refused = room.shortage(case, self._job.new_tokens)
        if refused is None:
            try:
                longest = self._prompts(case.batch, case.context, "1")
                warm = [p[:length] for p, length in zip(longest, warm_prompts(case), strict=True)]
                self._send(warm, self._job.warm_tokens)
                for repeat in range(self._job.repeats):
                    prompts = self._prompts(case.batch, case.context, f"2 {repeat}")
                    replies = self._send(prompts, self._job.new_tokens)
                    if not all(reply.arrivals for reply in replies):
                        refused = "a request ended without a token"
                        break
                    arrivals = [reply.arrivals for reply in replies]
                    self._tell(case=case.model_dump(), arrivals=arrivals)
            except (
                ValueError
            ) as error:  # how the engine refuses a request, for example one beyond its context
                refused = _one_line(error)
        if refused is not None:
            self._tell(case=case.model_dump(), refused=refused)
        self._done = before + self._job.tokens(case)
        self._tell(progress=self._done)

    def bulk(self, bulk: Bulk, room: Room) -> dict[str, Any]:
        """`turns`, or `refused` with the cause. A turn has its `seconds`, from sending all requests
        to the last token of the last one, and the share `reused` of its prompts that came from the
        prefix cache."""
        last = Case(batch=1, context=bulk.longest - bulk.new_tokens)
        refused, turns = room.shortage(last, bulk.new_tokens), []
        if refused is None:
            try:
                self._talk(bulk.warm(self._job.warm_tokens), "3")
                told = self._talk(bulk, "4")
                short = sum(
                    len(reply.ids) < bulk.new_tokens for replies in told for reply in replies
                )
                if short:
                    refused = f"{short} requests ended early"
                else:
                    turns = [_turn(replies) for replies in told]
            except ValueError as error:
                refused = _one_line(error)
        self._done = self._job.total_tokens
        self._tell(progress=self._done)
        return {"turns": turns} if refused is None else {"refused": refused}

    def _talk(self, bulk: Bulk, seed: str) -> list[list[Reply]]:
        """All turns of `bulk`, one after the other."""
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

        async def all_at_once() -> None:
            began = time.perf_counter()
            await asyncio.gather(*(self._one(reply, new_tokens, began) for reply in replies))

        self._engine.loop.run_until_complete(all_at_once())
        return replies

    async def _one(self, reply: Reply, new_tokens: int, began: float) -> None:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        stream = await self._engine.async_generate(
            input_ids=reply.prompt, sampling_params=sampling, stream=True
        )
        async for part in stream:
            self._advance(reply.take(part, time.perf_counter() - began))

    def _advance(self, tokens: int) -> None:
        self._done += tokens
        if time.monotonic() - self._told >= PACE:
            self._told = time.monotonic()
            self._tell(progress=self._done)


def _turn(replies: Sequence[Reply]) -> dict[str, float]:
    prompts = sum(len(reply.prompt) for reply in replies)
    return {
        "seconds": max(reply.arrivals[-1][0] for reply in replies),
        "reused": sum(reply.cached for reply in replies) / prompts,
    }


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400].rstrip(".")
    return (
        text
        if type(error).__module__.startswith("oscar_zoo.")
        else f"{type(error).__name__}: {text}"
    )


if __name__ == "__main__":
    _main()
