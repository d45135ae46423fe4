"""A model whose layers partly have a sliding window: a small Gemma 3, which stock SGLang keeps in
one pool, and an INT2 server in two.

In lossless mode its tokens are those of the stock backend. With INT2 slots they are those of a
reference that runs the whole sequence in this process, on every supported release of SGLang. Wrong
maps from layers to stores, and from token slots to sliding slots, show that both comparisons can
fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import engine_cases
import pytest
from engine_cases import (
    DONOR,
    GEOMETRIES,
    NEW,
    RECENT,
    SINK,
    answers,
    logprobs,
    one_at_a_time,
    retractions,
    turns,
)
from engines import CHUNK, ENGINE, RELEASES, Engines, needs_sglang, recall_prompts
from reference_server import Served, WholeReference, equal_answers, equal_tokens, reference_of

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.engines.sglang.capacity import PIECE, Planner, caches
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.other_layers import other_layers
from oscar_zoo.runtime.memory_plan import SLIDING_TABLES, SLOT_TABLES
from oscar_zoo.runtime.slot_plans import SlidingDemand

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

OTHERS = ("exaone4", "gpt_oss", "mellum")
FULL = engine_cases.GEOMETRIES["gemma3_text"].attention_layers


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("engines"))
    groups = engine_cases.scheduling_groups(queue=14, new=40)
    engine_cases.start(runs, ["windows_stock", "windows"], [*groups, *turns()])
    engine_cases.start(runs, ["windows_at_once", "windows_wrong_slots"], groups[:4])
    engine_cases.start(runs, ["windows_one_layer"], groups[:1])
    engine_cases.start(runs, ["windows_swapped"], one_at_a_time()[:-1])
    engine_cases.start(runs, [f"windows_{family}" for family in OTHERS], one_at_a_time()[:1])
    yield runs
    runs.close()


@pytest.fixture(scope="module", params=RELEASES)
def compressed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("compressed"), request.param)
    engine_cases.start(runs, ["windows_int2"], one_at_a_time())
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> WholeReference:
    return reference_of("gemma3_text", tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def donors(reference: WholeReference) -> list[Served]:
    """What the reference makes of the prompts, for every release."""
    return [reference.generate(ids, NEW) for ids in recall_prompts()]


def test_int2_tokens_are_those_of_the_reference(
    compressed: Engines, reference: WholeReference, donors: list[Served]
) -> None:
    """Chunked prefill, and a second turn that hits the first."""
    assert equal_answers(compressed.result("windows_int2")["groups"], reference, donors) > 0.7


def test_memory_is_planned_for_both_pools(compressed: Engines) -> None:
    """A token slot is INT2 in the full-attention layers. A sliding slot is float32 in the others,
    and there are about as many as stock SGLang would have."""
    run = compressed.result("windows_int2")
    (report,), (info,) = run["reports"], run["info"]
    facts = report["facts"]
    assert facts["slot_bytes"] == len(FULL) * 2 * 2 * (16 + 4)
    assert report["slot_store"] == (report["tokens"] + 1) * facts["slot_bytes"]
    sliding = facts["sliding"]
    assert sliding["nbytes"] == sliding["slots"] * 2 * 2 * 2 * 64 * 4
    assert sliding["slots"] < 0.25 * report["tokens"]
    assert run["memory"][0]["tokens"] == sliding["slots"] == info["memory"]["sliding_slots"]
    assert info["memory"]["sliding_bytes"] == sliding["nbytes"]
    assert f"INT2 KV cache: {sliding['slots']} sliding slots of" in compressed.log("windows_int2")


def test_fit_gpu_plans_with_the_demand_of_the_server(compressed: Engines) -> None:
    """In float32 on a CPU everything but codes has twice the bytes of 16 bits, and a pass adds
    fewer tokens. A window of Gemma 3 is one token shorter in SGLang than in its configuration."""
    (report,) = compressed.result("windows_int2")["reports"]
    served = SlidingDemand(**report["facts"]["sliding_demand"])
    others = other_layers(ConfigFile.of_folder(compressed.folder / "gemma3_text"), FULL)
    recipe = ServingRecipe(
        group_size=64, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=SINK, recent=RECENT)
    )
    plain, _, int2 = caches(GEOMETRIES["gemma3_text"], recipe, Layout(), others)
    requests = ENGINE["max_running_requests"]
    planned = Planner(int2, plain.token, recipe.windows, others).sliding_demand(requests)
    assert planned.token == served.token - SLOT_TABLES
    assert planned.plain_token * 2 == served.plain_token
    assert planned.sliding * 2 == served.sliding - SLIDING_TABLES
    assert planned.ratio == served.ratio
    pieces = 2 * (PIECE - CHUNK)
    assert planned.one_request - 1 - pieces == served.one_request
    assert planned.all_requests - requests - pieces == served.all_requests


def test_lossless_tokens_are_those_of_the_stock_backend(engines: Engines) -> None:
    """Chunked prefill, prefix hits, second turns, and fourteen requests for eight rows."""
    ours, stock = engines.result("windows"), engines.result("windows_stock")
    assert answers(ours) == answers(stock)
    assert logprobs(ours) == pytest.approx(logprobs(stock), abs=1e-3)


def test_two_ranks_mixed_chunks_and_retractions_change_no_token(engines: Engines) -> None:
    """The ratio of sliding slots is the user's, and leaves few of them."""
    ours, stock = engines.result("windows_at_once"), answers(engines.result("windows_stock"))
    found = answers(ours)
    assert found == {name: stock[name] for name in found}
    assert retractions(engines.log("windows_at_once")) > 0
    slots = [report["facts"]["sliding"]["slots"] for report in ours["reports"]]
    assert slots == [int(0.2 * ENGINE["max_total_tokens"])] * 2


def test_a_second_turn_hits_all_of_the_first(engines: Engines) -> None:
    """A short one takes over the ring of the first, which misses the last token."""
    ours = answers(engines.result("windows"), "cached")
    first = DONOR + NEW
    assert ours["long"] == [first]
    assert ours["short"] == [first - 1]


@pytest.mark.parametrize("mutant", ["windows_one_layer", "windows_wrong_slots"])
def test_the_comparison_notices_wrong_places(engines: Engines, mutant: str) -> None:
    """Full-attention layers share a store; sliding layers read the slots of the others."""
    found, stock = answers(engines.result(mutant)), answers(engines.result("windows_stock"))
    assert found != {name: stock[name] for name in found}


def test_the_reference_notices_layers_that_change_places(
    engines: Engines, reference: WholeReference, donors: list[Served]
) -> None:
    with pytest.raises(AssertionError, match="which leads by"):
        equal_answers(engines.result("windows_swapped")["groups"], reference, donors)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_have_the_tokens_of_the_reference(
    engines: Engines, tmp_path: Path, family: str
) -> None:
    """SGLang compares the backends of a small gpt-oss and EXAONE 4 with lists of its own. Layers of
    both kinds have learned sinks in gpt-oss, and in Mellum a rotary embedding for each kind; stock
    SGLang keeps both models in two pools. Only the layers with a window have one in EXAONE 4."""
    wanted = reference_of(family, tmp_path).generate(recall_prompts()[0], NEW)
    (tokens,) = engines.result(f"windows_{family}")["groups"]["new0"]["tokens"]
    assert equal_tokens(tokens, wanted) > 0.7 * NEW


@pytest.mark.parametrize("name", ["windows", "windows_at_once"])
def test_nothing_stays_behind(engines: Engines, name: str) -> None:
    before, after = engines.result(name)["memory"]
    assert before == after
    assert before["kept"] == before["locked"] == 0 < before["tokens"]
