"""What fits a GPU is divided as the server divides it."""

import importlib.util
from dataclasses import replace

import pytest

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.engines.sglang.capacity import Cache, Planner
from oscar_zoo.models.other_layers import STATES_PER_REQUEST, OtherLayers
from oscar_zoo.runtime.slot_plans import SlidingDemand, StateDemand

GB = 10**9
PLAIN, STATE, ROW = 20_480, 64_389_120, 384 * 20_480
SINKS, RING = 128 * PLAIN, 256 * PLAIN
WINDOWS = Windows(sink=64, recent=256)
STATES = OtherLayers(state=STATES_PER_REQUEST * STATE)
HYBRID = Cache("INT2", 2880, 0, 0, ROW + STATES_PER_REQUEST * STATE, SINKS, RING)
SLIDING = Cache("INT2", 2880, PLAIN, 1024, ROW, SINKS, RING)
ONE_WINDOW = OtherLayers(window=1024, layers=10, num_kv_heads=2, dims=512)


def planner(cache: Cache, other: OtherLayers | None, *, least: bool = True) -> Planner:
    return Planner(cache, PLAIN, WINDOWS, other, least)


@pytest.mark.parametrize("requests", [1, 16, 128])
@pytest.mark.parametrize("left", [5 * GB, 50 * GB])
def test_states_are_those_of_the_plan_of_a_server(left: int, requests: int) -> None:
    demand = StateDemand(STATE, STATES_PER_REQUEST, ROW, 2880, PLAIN, 0.9, requests)
    slots, running = demand.divide(left - ROW - STATE)
    found = planner(HYBRID, STATES).divide(left, requests)
    assert (found.states, found.requests) == (slots, running)
    taken = (slots + 1) * STATE + (running + 1) * ROW
    assert 0 <= left - taken - found.tokens * 2880 < 2880


def test_stock_sglang_gives_states_a_fixed_share() -> None:
    """And one slot of it to padding."""
    cache = Cache("BF16", PLAIN, request=STATES_PER_REQUEST * STATE)
    found = planner(cache, STATES).divide(50 * GB, 128)
    assert found.states == int(50 * GB * 0.9 / 1.9) // STATE - 1
    assert found.requests == found.states // STATES_PER_REQUEST < 128
    assert found.tokens == (50 * GB - (found.states + 1) * STATE) // PLAIN


def test_sliding_slots_are_those_of_the_plan_of_a_server() -> None:
    found = planner(SLIDING, ONE_WINDOW).divide(50 * GB, 64)
    held = 1024 + 256 + 2
    plan = SlidingDemand(2880, PLAIN, PLAIN, 0.8, held + 2 * 8192, 0).divide(50 * GB - 65 * ROW)
    assert (found.tokens, found.sliding, found.held) == (plan.tokens, plan.sliding, held)


@pytest.mark.parametrize(
    ("cache", "other"), [(HYBRID, STATES), (SLIDING, ONE_WINDOW)], ids=["states", "windows"]
)
@pytest.mark.parametrize("context", [1, 1000, 8192, 100_000])
def test_as_many_requests_fit_as_are_held(cache: Cache, other: OtherLayers, context: int) -> None:
    mine, left = planner(cache, other), 50 * GB
    number = mine.requests(left, context)
    assert number > 0 and mine.divide(left, number).holds(number, context)
    assert not mine.divide(left, number + 1).holds(number + 1, context)
    assert mine.divide(left, number).context >= context


@pytest.mark.parametrize("size", [10**3, 10**6, 10**8, 4 * 10**8])
@pytest.mark.parametrize("kind", ["INT2", "BF16"])
def test_what_nobody_knows_lies_between_two_numbers(kind: str, size: int) -> None:
    token, row = (2880, ROW) if kind == "INT2" else (PLAIN, 0)
    sinks, ring = (SINKS, RING) if kind == "INT2" else (0, 0)
    bare = Cache(kind, token, 0, 0, row, sinks, ring)
    known = replace(bare, request=row + STATES_PER_REQUEST * size)
    true = planner(known, OtherLayers(state=STATES_PER_REQUEST * size))
    unknown = planner(bare, OtherLayers(state=None))
    for requests in (1, 64):
        found = true.divide(50 * GB, requests)
        least = unknown.divide(50 * GB, requests)
        most = replace(unknown, least=False).divide(50 * GB, requests)
        # One state of padding, which the least does not know.
        assert least.tokens <= found.tokens + 1.1 * size / token
        assert found.tokens <= most.tokens + requests + row // token
    assert true.requests(50 * GB, 8192) <= replace(unknown, least=False).requests(50 * GB, 8192)


def test_windows_of_unknown_length_change_requests_alone() -> None:
    unknown = planner(replace(SLIDING, window=0), replace(ONE_WINDOW, window=None))
    true = planner(SLIDING, ONE_WINDOW)
    assert unknown.divide(50 * GB, 64).tokens == true.divide(50 * GB, 64).tokens
    most = replace(unknown, least=False).requests(50 * GB, 8192)
    assert unknown.requests(50 * GB, 8192) <= true.requests(50 * GB, 8192) <= most


def test_nothing_is_promised_of_layers_that_nobody_knows() -> None:
    assert planner(HYBRID, None).divide(50 * GB, 16).tokens == 0


@pytest.mark.sglang
@pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed")
def test_a_request_takes_as_many_state_slots_as_in_sglang() -> None:
    from sglang.srt.mem_cache import kv_cache_configurator as stock

    slots = stock.MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO
    assert slots + stock.MAMBA_CACHE_V2_ADDITIONAL_RATIO_OVERLAP == STATES_PER_REQUEST
