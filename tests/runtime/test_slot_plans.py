"""The division of memory between token slots and states, and between both pools of a model with
sliding windows: it fits, keeps the proportion of the engine, and all savings become token slots."""

from dataclasses import replace

import pytest

from oscar_zoo.runtime.memory_plan import SLIDING_TABLES, SLOT_TABLES
from oscar_zoo.runtime.slot_plans import TOKENS_PER_PREFIX, SlidingDemand, SlidingPlan, StateDemand

GB = 10**9
NEXT = StateDemand(
    state=77_000_000,
    per_request=5,
    row=384 * 24_576,
    token=12 * 2 * 2 * (64 + 8) + SLOT_TABLES,
    plain_token=12 * 2 * 2 * 256 * 2,
    ratio=0.9,
    requests=256,
)
"""Qwen3-Next-80B on one GPU: states in float32, and 12 layers of two KV heads."""
LFM2 = StateDemand(
    state=10 * 2048 * 3 * 2,
    per_request=3,
    row=384 * 12_288,
    token=6 * 8 * 2 * (16 + 4) + SLOT_TABLES,
    plain_token=12_288,
    ratio=0.9,
    requests=64,
)
"""LFM2-1.2B: convolutions have small states."""


@pytest.mark.parametrize("memory", [GB, 8 * GB, 45 * GB])
@pytest.mark.parametrize("demand", [NEXT, LFM2], ids=["next", "lfm2"])
def test_states_rows_and_tokens_fit(demand: StateDemand, memory: int) -> None:
    slots, requests = demand.divide(memory)
    assert 1 <= requests <= demand.requests and slots >= requests * demand.per_request
    found = demand.tokens(memory, slots, requests)
    assert found == (memory - slots * demand.state - requests * demand.row) // demand.token > 0


def engine(demand: StateDemand, memory: float) -> tuple[float, float]:
    """States and tokens of SGLang's own division, with tokens in 16 bits."""
    share = demand.ratio / (1 + demand.ratio)
    return memory * share / demand.state, memory * (1 - share) / demand.plain_token


def test_large_states_grow_with_the_tokens() -> None:
    """Without a new division, INT2 gives seven times the tokens for the same states; nobody could
    use them."""
    memory = 45 * GB
    slots, requests = NEXT.divide(memory)
    states, plain_tokens = engine(NEXT, memory)
    tokens = NEXT.tokens(memory, slots, requests)
    assert slots > 1.7 * states and tokens > 1.7 * plain_tokens
    assert requests == slots // NEXT.per_request > 1.6 * (states // NEXT.per_request)
    # As many tokens per state as the engine has without INT2.
    assert tokens / slots == pytest.approx(plain_tokens / states, rel=0.05)


def test_small_states_leave_the_memory_to_the_tokens() -> None:
    memory = 10 * GB
    slots, requests = LFM2.divide(memory)
    tokens = LFM2.tokens(memory, slots, requests)
    assert requests == LFM2.requests and tokens > 9 * engine(LFM2, memory)[1]
    idle = slots - LFM2.requests * LFM2.per_request
    assert idle == pytest.approx(tokens / TOKENS_PER_PREFIX, rel=0.01)
    slots, _ = replace(LFM2, most_tokens=6000).divide(memory)
    assert slots == 64 * 3 + 6000 // TOKENS_PER_PREFIX + 1


@pytest.mark.parametrize("requests", [1, 16, 128])
@pytest.mark.parametrize("state", [1, 10**5, 10**7, 10**8])
def test_no_state_is_so_large_that_fewer_tokens_are_left(state: int, requests: int) -> None:
    for demand in (NEXT, LFM2):
        known = replace(demand, state=state, requests=requests)
        memory = 45 * GB
        assert known.least_tokens(memory) <= known.tokens(memory, *known.divide(memory))
        assert known.least_tokens(memory) == replace(known, state=0).least_tokens(memory)


def test_one_request_is_planned_even_when_nothing_fits() -> None:
    """The memory plan then says what is missing."""
    assert NEXT.divide(0) == (NEXT.per_request, 1)


def demand(
    *, full: int, sliding: int, heads: int, dim: int, window: int, requests: int
) -> SlidingDemand:
    """A model in 16 bits, with so many layers of each kind, prefilled 8192 tokens at a time."""
    plain = 2 * heads * dim * 2
    held = window + 256 + 2
    return SlidingDemand(
        token=full * 2 * heads * (dim // 4 + 4) + SLOT_TABLES,
        plain_token=full * plain,
        sliding=sliding * plain + SLIDING_TABLES,
        ratio=0.8,
        one_request=held + 2 * 8192,
        all_requests=requests * held + 2 * 8192,
    )


GEMMA = demand(full=8, sliding=40, heads=8, dim=256, window=1024, requests=64)
OLMO = demand(full=8, sliding=24, heads=32, dim=128, window=4096, requests=32)
GPT_OSS = demand(full=18, sliding=18, heads=8, dim=64, window=128, requests=256)
MODELS = pytest.mark.parametrize("model", [GEMMA, OLMO, GPT_OSS], ids=["gemma", "olmo", "gpt-oss"])


def used(model: SlidingDemand, plan: SlidingPlan) -> int:
    return plan.tokens * model.token + plan.sliding * model.sliding


@MODELS
@pytest.mark.parametrize("memory", [20 * GB, 100 * GB])
def test_savings_become_token_slots(model: SlidingDemand, memory: int) -> None:
    plan = model.divide(memory)
    assert memory - model.token - model.sliding < used(model, plan) <= memory
    before = memory / (model.plain_token + model.ratio * model.sliding)
    assert plan.sliding == pytest.approx(model.ratio * before, abs=1)
    assert plan.tokens > 5.5 * before
    assert plan.ratio == plan.sliding / plan.tokens < 0.15


@MODELS
def test_little_memory_is_enough_for_one_request_or_shared_evenly(model: SlidingDemand) -> None:
    enough = 1.2 * model.one_request * (model.sliding + model.token)
    assert model.divide(enough).sliding == model.one_request
    least = model.divide(0.5 * enough)
    assert 0 <= least.tokens - least.sliding <= model.sliding / model.token + 1
    assert used(model, least) <= 0.5 * enough


@MODELS
def test_with_few_token_slots_running_requests_keep_their_windows(model: SlidingDemand) -> None:
    plan = model.divide(100 * GB)
    limited = model.limit(plan, 200_000)
    assert limited.tokens == 200_000
    assert limited.sliding == min(200_000, plan.sliding, model.all_requests)
    assert used(model, limited) <= 100 * GB
    assert model.limit(plan, plan.tokens) == replace(plan, tokens=plan.tokens)
    assert model.limit(plan, 100).sliding == 100
