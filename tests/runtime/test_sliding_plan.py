"""The division of memory between both pools of a model with sliding windows.

It fits, it leaves the layers with a window what an engine gives them, and all savings become token
slots.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from oscar_zoo.runtime.memory_plan import SLIDING_TABLES, SLOT_TABLES, Sliding
from oscar_zoo.runtime.sliding_plan import SlidingDemand, SlidingPlan

GB = 10**9


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


def test_the_line_names_the_flag() -> None:
    said = Sliding(slots=1000, nbytes=20_000_000, ratio=0.125).describe()
    assert said == (
        "1000 sliding slots of 20000 bytes for the layers with a sliding window = 20.0 MB, 0.125"
        " per token slot (--swa-full-tokens-ratio)"
    )
