"""What is wrong with a server's answers: nothing when they are the reference's, and each mistake
has its line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from architectures import write_architecture
from tiny_models import write_model

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.engines.server_client import Answer, Scored, ServerFacts
from oscar_zoo.evaluate.outcome import Recalled, ServerRow
from oscar_zoo.evaluate.questions import Conversation
from oscar_zoo.evaluate.server_comparison import (
    ReferenceRun,
    ServerQuestions,
    ServerRun,
    Turn,
    compare,
)
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import load_model

RECENT, HIT = 8, 32
TEXTS = torch.randint(3, 2000, (2, 70), generator=torch.Generator().manual_seed(1)).tolist()
FACTS = ServerFacts("0.5.17", "int2", "float32", "cpu", 16, 4, True, 1, 1000, 90)
Judge = Callable[[ServerRun], ServerRow]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceRun:
    model = load_model(str(write_model(tmp_path_factory.mktemp("model"))), dtype="float32")
    recipe = ServingRecipe(
        group_size=16, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=4, recent=RECENT)
    )
    cache = CacheSpec(hadamard_set(model.block, "k"), hadamard_set(model.block, "v"), recipe)
    return ReferenceRun(model, cache, ServerQuestions(tuple(map(tuple, TEXTS)), HIT, ()))


@pytest.fixture
def right(reference: ReferenceRun) -> ServerRun:
    """What a server without a fault answers; every answer is what the reference generates."""
    cold = tuple(Scored(reference.score(i, chunk=16, hit=0), 0) for i in range(2))
    warm = tuple(Scored(reference.score(i, chunk=16, hit=HIT), HIT) for i in range(2))
    talks = []
    for text in TEXTS:
        first = Turn(tuple(text[:40]), (0, 0), Answer((), 0), None)
        said = reference.answer(first, chunk=16)
        first = replace(first, right=said, alone=Answer(said, 0), talking=Answer(said, 0))
        later = Turn((*first.prompt, *said, *text[40:60]), (0, 0), Answer((), 0), None)
        ids = reference.answer(later, chunk=16)
        talks.append(
            (first, replace(later, right=ids, alone=Answer(ids, 0), talking=Answer(ids, 40)))
        )
    return ServerRun(FACTS, cold, warm, tuple(talks))


@pytest.fixture
def judge(reference: ReferenceRun) -> Judge:
    return partial(compare, reference=reference, recent=RECENT)


def test_a_right_server_has_nothing_wrong(judge: Judge, right: ServerRun) -> None:
    row = judge(right)
    cold, warm = row.perplexity, row.perplexity_after_hit
    assert row.violations == () and cold is not None and warm is not None
    assert cold.deviation == warm.deviation == 0 and cold.exact != cold.server
    assert row.recall == Recalled(4, 1.0, 1.0, 1.0) and row.reused_tokens == (HIT, HIT)


def test_perplexity_has_a_limit_in_both_directions(judge: Judge, right: ServerRun) -> None:
    for factor in (0.994, 1.006, math.nan):
        shifted = tuple(
            Scored(tuple(v - math.log(factor) for v in s.values), s.cached) for s in right.cold
        )
        (line,) = judge(replace(right, cold=shifted)).violations
        assert line.startswith("perplexity ") and "limit 0.5 %" in line
    shifted = tuple(
        Scored(tuple(v - math.log(1.004) for v in s.values), s.cached) for s in right.cold
    )
    assert judge(replace(right, cold=shifted)).violations == ()


def test_a_hit_is_judged_by_the_tokens_it_had(
    judge: Judge, right: ServerRun, reference: ReferenceRun
) -> None:
    scored = len(right.warm[0].values)
    shorter = tuple(Scored(reference.score(i, chunk=16, hit=16)[-scored:], 16) for i in range(2))
    assert judge(replace(right, warm=shorter)).violations == ()
    lost = tuple(Scored(reference.score(i, chunk=16, hit=HIT, sinks=False), HIT) for i in range(2))
    row = judge(replace(right, warm=lost))
    assert row.perplexity_after_hit is not None
    assert row.perplexity_after_hit.server == row.perplexity_after_hit_without_sinks
    (line,) = row.violations
    assert line.startswith("perplexity after a hit ")


def test_reuse_that_is_missing_or_must_not_be_is_told(judge: Judge, right: ServerRun) -> None:
    none = tuple(Scored(s.values, 0) for s in right.warm)
    assert judge(replace(right, warm=none)).violations == ("a repeated prefix was not reused",)
    stale = tuple(Scored(s.values, 4) for s in right.cold)
    assert judge(replace(right, cold=stale)).violations == ("tokens were reused after a flush",)
    for cached, fine in ((36, False), (39, False), (40, True), (42, True), (43, False)):
        talks = tuple(
            (first, replace(later, talking=replace(later.talking, cached=cached)))
            for first, later in right.talks
        )
        lines = judge(replace(right, talks=talks)).violations
        assert (
            lines == ()
            if fine
            else lines == (f"a turn reused {cached} of 42 tokens of the conversation before it",)
        )


def test_a_model_with_states_reuses_up_to_the_last_saved_state(
    right: ServerRun, tmp_path: Path
) -> None:
    folder = write_architecture("lfm2", tmp_path / "lfm2", dtype="float32")
    model = load_model(str(folder), dtype="float32")
    spec = CacheSpec(None, None, ServingRecipe(group_size=16, clip=Clip(k=0.96, v=0.92)))
    questions = ServerQuestions(tuple(map(tuple, TEXTS)), HIT, ())
    reference = ReferenceRun(model, spec, questions)
    for cached, fine in ((0, True), (36, True), (42, True), (43, False)):
        talks = tuple(
            (first, replace(later, talking=replace(later.talking, cached=cached)))
            for first, later in right.talks
        )
        run = replace(right, cold=(), warm=(), talks=talks)
        lines = compare(run, reference, recent=RECENT).violations
        assert any("a turn reused" in line for line in lines) != fine


def test_recall_that_is_worse_in_conversations_is_told(judge: Judge, right: ServerRun) -> None:
    wrong = Answer((1, 1), 0)
    talks = right.talks * 3
    worse = tuple(
        tuple(replace(turn, talking=replace(turn.talking, ids=wrong.ids)) for turn in talk)
        for talk in talks
    )
    assert any(
        line.startswith("recall in conversations: 0 of 12 right")
        for line in judge(replace(right, talks=worse)).violations
    )
    other = tuple(tuple(replace(turn, alone=wrong) for turn in talk) for talk in talks)
    assert any(
        line.startswith("recall: 0 of 12 right, the reference 12")
        for line in judge(replace(right, talks=other)).violations
    )


@pytest.mark.parametrize(("missed", "fine"), [(0, True), (7, True), (8, False)])
def test_recall_may_differ_by_chance(
    judge: Judge, right: ServerRun, missed: int, fine: bool
) -> None:
    """A coin falls seven times on one side in 1.6 % of all runs, eight times in 0.8 %."""
    turns = [turn for talk in right.talks * 3 for turn in talk]
    wrong = [
        replace(turn, alone=Answer((1, 1), 0), talking=Answer((1, 1), turn.talking.cached))
        for turn in turns
    ]
    talks = tuple((turn,) for turn in [*wrong[:missed], *turns[missed:]])
    assert (judge(replace(right, talks=talks)).violations == ()) == fine


def test_every_turn_asks_for_a_fact_that_is_no_longer_in_a_window() -> None:
    from oscar_zoo.evaluate.server_comparison import make_questions

    def encode(text: str) -> list[int]:
        return [ord(c) % 251 for c in text]

    filler = [300 + i for i in range(40_000)]
    windows = Windows(sink=64, recent=256)
    made = make_questions(
        filler,
        encode,
        tasks=("recall", "perplexity"),
        exact=windows,
        length=4000,
        windows=3,
        answers=7,
    )
    assert (
        len(made.conversations) == 3
        and len(made.texts) == 3
        and made.shared % 128 == 0
        and made.longest <= 4000
    )
    for talk in made.conversations:
        assert len(talk.says) == len(talk.answers) == 3
        context = talk.says[0]
        for says, answer in zip(talk.says[1:], talk.answers[1:], strict=True):
            assert len(says) > 256 + 64
            places = [i for i in range(len(context)) if context[i : i + len(answer)] == answer]
            assert places and 64 <= places[0] < len(context) - 256
    assert isinstance(made.conversations[0], Conversation)
