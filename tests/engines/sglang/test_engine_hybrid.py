"""A model whose layers do not all keep keys and values, on every supported release of SGLang: a
small LFM2, where convolutions and full attention take turns.

The convolutions run in PyTorch (`plain_convolutions`), in the stock server as well. In lossless
mode its tokens are those of the stock backend. With INT2 slots they are those of a
reference that runs the whole sequence in this process. Two wrong maps from layers to stores show
that both comparisons can fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import engine_cases
import pytest
from engine_cases import (
    DONOR,
    NEW,
    RECENT,
    SINK,
    answers,
    logprobs,
    one_at_a_time,
    retractions,
    turns,
)
from engines import ENGINE, INSTALLED, RELEASES, Engines, needs_sglang, recall_prompts
from reference_server import Served, WholeReference, equal_answers, reference_of

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.engines.sglang.capacity import Planner, caches
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.other_layers import other_layers
from oscar_zoo.runtime.memory_plan import SLOT_TABLES
from oscar_zoo.runtime.slot_plans import TOKENS_PER_PREFIX, StateDemand

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

FULL = engine_cases.GEOMETRIES["Lfm2"].attention_layers


@pytest.fixture(scope="module", params=RELEASES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("engines"), request.param)
    groups = engine_cases.scheduling_groups(new=8)
    at_once = groups[:4]
    if request.param != INSTALLED:  # a first turn, a second one, and the queue
        groups = [groups[0], *groups[2:4]]
        at_once = [groups[0], groups[2]]
    engine_cases.start(runs, ["hybrid_stock", "hybrid"], [*groups, *turns()])
    engine_cases.start(runs, ["hybrid_at_once"], at_once)
    engine_cases.start(runs, ["hybrid_few_states"], groups[:1])
    engine_cases.start(runs, ["hybrid_int2"], one_at_a_time())
    if request.param == INSTALLED:
        engine_cases.start(runs, ["hybrid_one_layer"], groups[:1])
        engine_cases.start(runs, ["hybrid_swapped"], one_at_a_time()[:-1])
    yield runs
    runs.close()


installed_only = pytest.mark.parametrize("engines", [INSTALLED], indirect=True)
"""For tests of a comparison, which is the same one for every release."""


def test_lossless_tokens_are_those_of_the_stock_backend(engines: Engines) -> None:
    """Chunked prefill, prefix hits, second turns, and ten requests for eight rows."""
    ours, stock = engines.result("hybrid"), engines.result("hybrid_stock")
    assert answers(ours) == answers(stock)
    assert logprobs(ours) == pytest.approx(logprobs(stock), abs=1e-3)


def test_two_ranks_mixed_chunks_and_retractions_change_no_token(engines: Engines) -> None:
    ours, stock = engines.result("hybrid_at_once"), answers(engines.result("hybrid_stock"))
    found = answers(ours)
    assert found == {name: stock[name] for name in found}
    assert retractions(engines.log("hybrid_at_once")) > 0
    first, second = (report["facts"]["states"] for report in ours["reports"])
    assert first == second


def test_a_second_turn_hits_the_state_at_the_end_of_the_first(engines: Engines) -> None:
    """Also a turn that is shorter than the window, which takes over the ring of the first.
    `test_lossless_tokens_are_those_of_the_stock_backend` has its tokens."""
    ours, stock = (answers(engines.result(name), "cached") for name in ("hybrid", "hybrid_stock"))
    first = DONOR + NEW - 1
    assert stock["short"] == stock["long"] == ours["long"] == ours["short"] == [first]


@installed_only
def test_the_comparison_notices_layers_that_share_a_store(engines: Engines) -> None:
    found = answers(engines.result("hybrid_one_layer"))
    assert found["first"] != answers(engines.result("hybrid_stock"))["first"]


def test_memory_counts_full_attention_layers_only(engines: Engines) -> None:
    (report,) = engines.result("hybrid_int2")["reports"]
    facts = report["facts"]
    assert facts["slot_bytes"] == len(FULL) * 2 * 2 * (16 + 4)
    assert report["slot_store"] == (report["tokens"] + 1) * facts["slot_bytes"]
    assert facts["subtracted"] == report["window_store"] + report["transforms"] + report["scratch"]
    (info,) = engines.result("hybrid_int2")["info"]
    assert info["memory"]["slot_bytes"] == facts["slot_bytes"] and info["bits_per_element"] == 2.5
    assert info["artifact"]["id"] is not None


@pytest.mark.parametrize("name", ["hybrid", "hybrid_int2"])
def test_there_are_as_many_states_as_requests_and_cached_prefixes_use(
    engines: Engines, name: str
) -> None:
    """Stock SGLang gives them a share of the memory, of which 6144 tokens need little."""
    run = engines.result(name)
    (report,), (info,) = run["reports"], run["info"]
    slots, nbytes = run["memory"][0]["states"]
    rows, tokens = ENGINE["max_running_requests"], ENGINE["max_total_tokens"]
    assert slots == 3 * rows + tokens // TOKENS_PER_PREFIX + 1
    assert report["facts"]["states"] == {
        "slots": slots,
        "nbytes": nbytes,
        "requests": rows,
        "draft_bytes": 0,
    }
    assert (info["memory"]["state_slots"], info["memory"]["state_bytes"]) == (slots, nbytes)
    assert f"INT2 KV cache: {slots} state slots of" in engines.log(name)
    assert engines.result("hybrid_stock")["memory"][0]["states"][0] > 100 * slots


@installed_only
def test_fit_gpu_plans_with_the_demand_of_the_server(engines: Engines) -> None:
    """In float32 on a CPU everything but codes has twice the bytes of 16 bits. Without overlap a
    request takes three state slots in place of five."""
    (report,) = engines.result("hybrid_int2")["reports"]
    served = StateDemand(**report["facts"]["state_demand"])
    config = ConfigFile.of_folder(engines.folder / "Lfm2")
    others = other_layers(config, FULL)
    recipe = ServingRecipe(
        group_size=64, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=SINK, recent=RECENT)
    )
    plain, _, int2 = caches(engine_cases.GEOMETRIES["Lfm2"], recipe, Layout(), others)
    planned = Planner(int2, plain.token, recipe.windows, others).state_demand(served.requests)
    assert (
        planned.state * 2
        == served.state
        == report["facts"]["states"]["nbytes"] // (report["facts"]["states"]["slots"] + 1)
    )
    assert planned.plain_token * 2 == served.plain_token
    assert planned.token == served.token - SLOT_TABLES
    assert 0 < served.row - planned.row * 2 < 0.1 * served.row  # tables of a row, beside windows
    assert (planned.requests, planned.per_request, served.per_request) == (8, 5, 3)
    assert planned.ratio == served.ratio


def test_a_number_of_states_that_the_user_named_is_kept(engines: Engines) -> None:
    """Enough for two requests at a time, so windows are planned for two."""
    run = engines.result("hybrid_few_states")
    (report,) = run["reports"]
    assert run["memory"][0]["states"][0] == 7 and report["facts"]["states"]["requests"] == 2
    assert report["rows"] == 3
    assert report["facts"]["subtracted"] == (
        report["window_store"] + report["transforms"] + report["scratch"]
    )
    assert answers(run)["first"] == answers(engines.result("hybrid_stock"))["first"]


@pytest.mark.parametrize("name", ["hybrid", "hybrid_at_once", "hybrid_int2"])
def test_nothing_stays_behind(engines: Engines, name: str) -> None:
    before, after = engines.result(name)["memory"]
    assert before == after
    assert before["kept"] == before["locked"] == 0 < before["tokens"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> WholeReference:
    return reference_of("Lfm2", tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def donors(reference: WholeReference) -> list[Served]:
    """What the reference makes of the prompts, for every release."""
    return [reference.generate(ids, NEW) for ids in recall_prompts()]


def test_int2_tokens_are_those_of_the_reference(
    engines: Engines, reference: WholeReference, donors: list[Served]
) -> None:
    groups = engines.result("hybrid_int2")["groups"]
    assert equal_answers(groups, reference, donors) > 0.7


@installed_only
def test_the_reference_notices_layers_that_change_places(
    engines: Engines, donors: list[Served]
) -> None:
    """Each layer is written and read with the rotation of the other one, which lossless slots do
    not show."""
    with pytest.raises(AssertionError, match="which leads by"):
        equal_answers(engines.result("hybrid_swapped")["groups"], reference, donors)
