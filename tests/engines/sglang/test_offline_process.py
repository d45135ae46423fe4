"""What is made of streams: tokens, times, and the prompts of the next turn. An object stands in for
the engine."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from oscar_zoo.engines.sglang.offline_process import (
    FOLLOW_UP,
    Bulk,
    Case,
    OfflineBench,
    OfflineJob,
    Reply,
)

ANSWER = [5, 6, 7, 8]
ROOM = {"tokens": 10_000, "requests": 8}


def part(ids: list[int], count: int, cached: int = 0) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"completion_tokens": count, "cached_tokens": cached}}


@pytest.mark.parametrize(
    ("parts", "arrivals"),
    [
        ([part(ANSWER[:n], n) for n in (1, 2, 4)], [1, 2, 4]),
        (
            [part(ANSWER[:1], 1), part(ANSWER[1:2], 2), part(ANSWER[2:], 4)],
            [1, 2, 4],
        ),  # only what is new
        ([part([], 0), part(ANSWER, 4)], [4]),
        (
            [part(ANSWER[:3], 2), part(ANSWER, 4), part(ANSWER, 4)],
            [2, 4],
        ),  # the list of the engine goes on
    ],
)
def test_tokens_of_all_ways_to_stream(parts: list[dict[str, Any]], arrivals: list[int]) -> None:
    reply = Reply([1, 2, 3])
    added = [reply.take(one, float(i)) for i, one in enumerate(parts)]
    assert reply.ids == ANSWER and [count for _, count in reply.arrivals] == arrivals
    assert sum(added) == len(reply.prompt) + len(ANSWER)


class Engine:
    """Answers every prompt with `new_tokens` numbers made of its length; knows what it was
    asked."""

    def __init__(self, *, missing: int = 0, refuses_after: int = 1 << 30) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=1000))
        self.prompts: list[list[int]] = []
        self._missing, self._refuses_after = missing, refuses_after

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> AsyncIterator[dict[str, Any]]:
        assert stream and sampling_params["temperature"] == 0 and sampling_params["ignore_eos"]
        if len(self.prompts) == self._refuses_after:
            raise ValueError("no more.")
        self.prompts.append(list(input_ids))
        ids = [len(input_ids)] * (sampling_params["max_new_tokens"] - self._missing)

        async def parts() -> AsyncIterator[dict[str, Any]]:
            for count in range(1, len(ids) + 1):
                yield part(ids[:count], count, cached=len(input_ids) // 4)

        return parts()


def bulk_of(engine: Engine, bulk: Bulk) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is made of a bulk, and the last news."""
    told: list[dict[str, Any]] = []
    job = OfflineJob(arguments=(), cases=(), new_tokens=9, news="n", bulk=bulk)
    done = OfflineBench(engine, job, lambda **news: told.append(news), **ROOM).bulk(bulk)
    engine.loop.close()
    return done, told[-1]


def test_every_turn_goes_on_from_the_answers() -> None:
    bulk, engine = Bulk(requests=3, context=40, new_tokens=10, turns=3), Engine()
    done, last = bulk_of(engine, bulk)
    reused = [0.25, 28 / 114, 47 / 188]
    assert [turn["reused"] for turn in done["turns"]] == pytest.approx(reused, abs=0.01)
    assert all(turn["seconds"] > 0 for turn in done["turns"])
    assert [len(prompt) for prompt in engine.prompts[:6]] == [40, 40, 112, 112, 184, 184]
    first, second, third = (engine.prompts[at : at + 3] for at in (6, 9, 12))
    for before, after, length in ((first, second, 40), (second, third, 114)):
        for earlier, later in zip(before, after, strict=True):
            assert later[: length + 10] == [*earlier, *[length] * 10]
            assert len(later) == length + 10 + FOLLOW_UP
    assert len({tuple(prompt) for prompt in engine.prompts}) == len(engine.prompts) == 15
    assert last["progress"] == bulk.tokens + bulk.warm(8).tokens


def test_a_bulk_that_ends_early_or_does_not_fit_is_no_figure() -> None:
    early = bulk_of(Engine(missing=1), Bulk(requests=3, context=40, new_tokens=10))
    assert early[0] == {"refused": "3 requests ended early"}
    engine = Engine()
    done, _ = bulk_of(engine, Bulk(requests=3, context=9_950, new_tokens=10, turns=2))
    assert done == {"refused": "needs 10,034 tokens, the cache has 10,000"}
    assert engine.prompts == []


PAIR = Case(batch=2, context=40)
REPEATED = OfflineJob(arguments=(), cases=(PAIR,), new_tokens=9, repeats=3, news="n")


def measured(engine: Engine) -> list[dict[str, Any]]:
    """What is told of a case, without the progress, which counts all of its tokens in the end."""
    told: list[dict[str, Any]] = []
    OfflineBench(engine, REPEATED, lambda **news: told.append(news), **ROOM).measure(PAIR)
    engine.loop.close()
    assert told[-1] == {"progress": REPEATED.total_tokens}
    return [news for news in told if "case" in news]


def test_a_case_is_told_once_per_repeat_and_every_repeat_has_prompts_of_its_own() -> None:
    engine = Engine()
    news = measured(engine)
    assert [one["case"] for one in news] == [PAIR.model_dump()] * 3
    for request in news[0]["arrivals"]:
        assert [count for _, count in request] == [*range(1, 10)]
    assert len({tuple(prompt) for prompt in engine.prompts}) == 2 * (1 + 3)  # and the warm-up
    assert sorted(map(len, engine.prompts[:2])) == [40, 40]


def test_a_repeat_that_is_refused_ends_its_case_and_keeps_the_earlier_ones() -> None:
    first, second = measured(Engine(refuses_after=4))
    assert "arrivals" in first and second["refused"] == "ValueError: no more"
    (only,) = measured(Engine(missing=9))
    assert only == {"case": PAIR.model_dump(), "refused": "a request ended without a token"}
