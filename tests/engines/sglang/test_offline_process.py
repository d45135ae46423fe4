"""What is made of streams: tokens, times, and the prompts of the next turn. An object stands in for
the engine."""

from __future__ import annotations

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
    Room,
)

ANSWER = [5, 6, 7, 8]
ROOM = Room(tokens=10_000, requests=8)


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


@pytest.fixture
def told() -> list[dict[str, Any]]:
    return []


def bench(engine: Engine, told: list[dict[str, Any]], bulk: Bulk) -> OfflineBench:
    job = OfflineJob(arguments=(), cases=(), new_tokens=9, news="n", bulk=bulk)
    return OfflineBench(engine, job, lambda **news: told.append(news))


def test_every_turn_goes_on_from_the_answers(told: list[dict[str, Any]]) -> None:
    bulk, engine = Bulk(requests=3, context=40, new_tokens=10, turns=3), Engine()
    done = bench(engine, told, bulk).bulk(bulk, ROOM)
    engine.loop.close()
    assert [turn["reused"] for turn in done["turns"]] == pytest.approx(
        [0.25, 28 / 114, 47 / 188], abs=0.01
    )
    assert all(turn["seconds"] > 0 for turn in done["turns"])
    warm_up, first, second, third = (
        engine.prompts[:6],
        *(engine.prompts[6 + 3 * n : 9 + 3 * n] for n in range(3)),
    )
    assert [len(prompt) for prompt in warm_up] == [40, 40, 112, 112, 184, 184] and len(
        engine.prompts
    ) == 15
    for before, after, length in ((first, second, 40), (second, third, 114)):
        for earlier, later in zip(before, after, strict=True):
            assert (
                later[: length + 10] == [*earlier, *[length] * 10]
                and len(later) == length + 10 + FOLLOW_UP
            )
    assert len({tuple(prompt) for prompt in engine.prompts}) == 15
    assert told[-1]["progress"] == bulk.tokens + bulk.warm(8).tokens


def test_an_answer_that_ends_early_is_no_figure(told: list[dict[str, Any]]) -> None:
    bulk, engine = Bulk(requests=3, context=40, new_tokens=10), Engine(missing=1)
    assert bench(engine, told, bulk).bulk(bulk, ROOM) == {"refused": "3 requests ended early"}
    engine.loop.close()


def test_a_conversation_that_does_not_fit_is_not_begun(told: list[dict[str, Any]]) -> None:
    bulk, engine = Bulk(requests=3, context=9_950, new_tokens=10, turns=2), Engine()
    assert bench(engine, told, bulk).bulk(bulk, ROOM) == {
        "refused": "needs 10,034 tokens, the cache has 10,000"
    }
    engine.loop.close()
    assert engine.prompts == []


PAIR = Case(batch=2, context=40)
REPEATED = OfflineJob(arguments=(), cases=(PAIR,), new_tokens=9, repeats=3, news="n")


def measured(engine: Engine, told: list[dict[str, Any]], job: OfflineJob) -> list[dict[str, Any]]:
    """What is told of the case, without the progress."""
    OfflineBench(engine, job, lambda **news: told.append(news)).measure(PAIR, ROOM)
    engine.loop.close()
    return [news for news in told if "case" in news]


def test_a_case_is_told_once_per_repeat_and_every_repeat_has_prompts_of_its_own(
    told: list[dict[str, Any]],
) -> None:
    engine = Engine()
    news = measured(engine, told, REPEATED)
    assert [one["case"] for one in news] == [PAIR.model_dump()] * 3
    assert all(
        [count for _, count in request] == [*range(1, 10)] for request in news[0]["arrivals"]
    )
    assert len({tuple(prompt) for prompt in engine.prompts}) == 2 * (1 + 3)  # and the warm-up
    assert sorted(map(len, engine.prompts[:2])) == [40, 40]
    assert told[-1] == {"progress": REPEATED.total_tokens}


def test_a_repeat_that_is_refused_ends_its_case_and_keeps_the_earlier_ones(
    told: list[dict[str, Any]],
) -> None:
    news = measured(Engine(refuses_after=4), told, REPEATED)
    assert "arrivals" in news[0] and news[1]["refused"] == "ValueError: no more" and len(news) == 2
    assert told[-1] == {"progress": REPEATED.total_tokens}


def test_a_request_without_a_token_is_no_figure(told: list[dict[str, Any]]) -> None:
    (only,) = measured(Engine(missing=9), told, REPEATED)
    assert only == {"case": PAIR.model_dump(), "refused": "a request ended without a token"}
