"""What is wrong with a server's answers: nothing when they are the reference's, and each mistake
has its line."""

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
from oscar_zoo.evaluate.server_comparison import (
    ReferenceRun,
    ServerQuestions,
    ServerRun,
    Turn,
    compare,
    make_questions,
)
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import load_model

RECENT, HIT = 8, 32
TEXTS = torch.randint(3, 2000, (2, 70), generator=torch.Generator().manual_seed(1)).tolist()
QUESTIONS = ServerQuestions(tuple(map(tuple, TEXTS)), HIT, ())
FACTS = ServerFacts("0.5.17", "int2", "float32", "cpu", 16, 4, True, 1, 1000, 90)
CLIP = Clip(k=0.96, v=0.92)
WRONG = (1, 1)
Judge = Callable[[ServerRun], ServerRow]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceRun:
    model = load_model(str(write_model(tmp_path_factory.mktemp("model"))), dtype="float32")
    recipe = ServingRecipe(group_size=16, clip=CLIP, windows=Windows(sink=4, recent=RECENT))
    cache = CacheSpec(hadamard_set(model.block, "k"), hadamard_set(model.block, "v"), recipe)
    return ReferenceRun(model, cache, QUESTIONS)


@pytest.fixture
def right(reference: ReferenceRun) -> ServerRun:
    """What a server without a fault answers; every answer is what the reference generates."""
    cold = tuple(Scored(reference.score(i, chunk=16, hit=0), 0) for i in range(2))
    warm = tuple(Scored(reference.score(i, chunk=16, hit=HIT), HIT) for i in range(2))

    def turn(prompt: tuple[int, ...], cached: int) -> Turn:
        ids = reference.answer(Turn(prompt, (0, 0), Answer((), 0), None), chunk=16)
        return Turn(prompt, ids, Answer(ids, 0), Answer(ids, cached))

    talks = []
    for text in TEXTS:
        first = turn(tuple(text[:40]), 0)
        talks.append((first, turn((*first.prompt, *first.right, *text[40:60]), 40)))
    return ServerRun(FACTS, cold, warm, tuple(talks))


@pytest.fixture
def judge(reference: ReferenceRun) -> Judge:
    return partial(compare, reference=reference)


def shifted(scored: tuple[Scored, ...], factor: float) -> tuple[Scored, ...]:
    """With a perplexity that is so much larger."""
    return tuple(Scored(tuple(v - math.log(factor) for v in s.values), s.cached) for s in scored)


def reusing(run: ServerRun, cached: int) -> ServerRun:
    """The second turn of every conversation took so many tokens from the cache."""
    talks = ((a, replace(b, talking=replace(b.talking, cached=cached))) for a, b in run.talks)
    return replace(run, talks=tuple(talks))


def test_a_right_server_has_nothing_wrong(judge: Judge, right: ServerRun) -> None:
    row = judge(right)
    cold, warm = row.perplexity, row.perplexity_after_hit
    assert row.violations == () and cold is not None and warm is not None
    assert cold.deviation == warm.deviation == 0 and cold.exact != cold.server
    assert row.recall == Recalled(4, 1.0, 1.0, 1.0) and row.reused_tokens == (HIT, HIT)


@pytest.mark.parametrize(
    ("factor", "fine"), [(0.994, False), (1.006, False), (math.nan, False), (1.004, True)]
)
def test_perplexity_has_a_limit_in_both_directions(
    judge: Judge, right: ServerRun, factor: float, fine: bool
) -> None:
    found = judge(replace(right, cold=shifted(right.cold, factor))).violations
    assert len(found) == (not fine) and all(line.startswith("perplexity ") for line in found)


def test_a_hit_is_judged_by_tokens(judge: Judge, right: ServerRun, reference: ReferenceRun) -> None:
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
        lines = judge(reusing(right, cached)).violations
        assert len(lines) == (not fine) and all(f"a turn reused {cached} " in x for x in lines)


def test_a_model_with_states_reuses_to_the_last_saved(right: ServerRun, tmp_path: Path) -> None:
    folder = write_architecture("lfm2", tmp_path / "lfm2", dtype="float32")
    model = load_model(str(folder), dtype="float32")
    windows = Windows(sink=4, recent=RECENT)
    spec = CacheSpec(None, None, ServingRecipe(group_size=16, clip=CLIP, windows=windows))
    reference = ReferenceRun(model, spec, QUESTIONS)
    for cached, fine in ((0, True), (36, True), (42, True), (43, False)):
        run = reusing(replace(right, cold=(), warm=()), cached)
        lines = compare(run, reference).violations
        assert any("a turn reused" in line for line in lines) != fine


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("talking", "recall in conversations: 0 of 12 right"),
        ("alone", "recall: 0 of 12 right, the reference 12"),
    ],
)
def test_recall_that_is_worse_in_conversations_is_told(
    judge: Judge, right: ServerRun, part: str, said: str
) -> None:
    talks = tuple(
        tuple(replace(turn, **{part: replace(getattr(turn, part), ids=WRONG)}) for turn in talk)
        for talk in right.talks * 3
    )
    found = judge(replace(right, talks=talks)).violations
    assert any(line.startswith(said) for line in found)


@pytest.mark.parametrize(("missed", "fine"), [(0, True), (7, True), (8, False)])
def test_recall_differs_by_chance(judge: Judge, right: ServerRun, missed: int, fine: bool) -> None:
    """A coin falls seven times on one side in 1.6 % of all runs, eight times in 0.8 %."""
    turns = [turn for talk in right.talks * 3 for turn in talk]
    wrong = [
        replace(turn, alone=Answer(WRONG, 0), talking=Answer(WRONG, turn.talking.cached))
        for turn in turns
    ]
    talks = tuple((turn,) for turn in [*wrong[:missed], *turns[missed:]])
    assert (judge(replace(right, talks=talks)).violations == ()) == fine


def test_every_turn_asks_for_a_fact_that_is_no_longer_in_a_window() -> None:
    made = make_questions(
        [300 + i for i in range(40_000)],
        lambda text: [ord(c) % 251 for c in text],
        tasks=("recall", "perplexity"),
        exact=Windows(sink=64, recent=256),
        length=4000,
        windows=3,
        answers=7,
    )
    assert (len(made.conversations), len(made.texts), made.turns) == (3, 3, 9)
    assert made.shared % 128 == 0 and made.longest <= 4000
    for (context, _), *others in made.conversations:
        for says, answer in others:
            assert len(says) > 256 + 64
            places = [i for i in range(len(context)) if context[i : i + len(answer)] == answer]
            assert places and 64 <= places[0] < len(context) - 256
