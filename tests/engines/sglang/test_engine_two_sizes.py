"""A model whose full-attention layers have heads of another width, and other KV heads, than its
layers with a sliding window: a small Gemma 4, whose values are its keys before their norm.

Without an INT2 cache SGLang serves it on a CPU from 0.5.21 on. From 0.5.23 on it reads it with a
newer transformers than the one that is installed here.
"""

from __future__ import annotations

from collections.abc import Iterator

import engine_cases
import pytest
from engine_cases import DONOR, NEW, answers, logprobs, one_at_a_time, retractions, turns
from engines import RELEASES, Engines, needs_sglang, recall_prompts
from reference_server import Served, WholeReference, equal_answers, reference_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

WIDE = engine_cases.WIDE
SERVED = RELEASES[: RELEASES.index("0.5.23")]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("engines"))
    groups = engine_cases.scheduling_groups(queue=14, new=40)
    engine_cases.start(runs, ["two_sizes_stock", "two_sizes"], [*groups, *turns()])
    engine_cases.start(runs, ["two_sizes_at_once"], groups[:4])
    engine_cases.start(runs, ["two_sizes_swapped"], one_at_a_time()[:-1])
    yield runs
    runs.close()


@pytest.fixture(scope="module", params=SERVED)
def compressed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("compressed"), request.param)
    engine_cases.start(runs, ["two_sizes_int2"], one_at_a_time())
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> WholeReference:
    return reference_of("gemma4", tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def donors(reference: WholeReference) -> list[Served]:
    """What the reference makes of the prompts, for every release."""
    return [reference.generate(ids, NEW) for ids in recall_prompts()]


def test_int2_tokens_are_those_of_the_reference(
    compressed: Engines, reference: WholeReference, donors: list[Served]
) -> None:
    """Chunked prefill, and a second turn that hits the first."""
    assert equal_answers(compressed.result("two_sizes_int2")["groups"], reference, donors) > 0.7


def test_each_pool_has_the_heads_of_its_layers(compressed: Engines) -> None:
    """Two KV heads of 128 channels in the full-attention layers, four of 64 in the others."""
    run = compressed.result("two_sizes_int2")
    (report,), (info,) = run["reports"], run["info"]
    facts = report["facts"]
    assert facts["slot_bytes"] == len(WIDE.attention_layers) * 2 * 2 * (128 // 4 + 4)
    assert report["slot_store"] == (report["tokens"] + 1) * facts["slot_bytes"]
    sliding = facts["sliding"]
    assert sliding["nbytes"] == sliding["slots"] * 2 * 4 * 2 * 64 * 4
    assert run["memory"][0]["tokens"] == sliding["slots"] == info["memory"]["sliding_slots"]


def test_a_request_with_an_image_is_refused(compressed: Engines) -> None:
    """SGLang alone would answer as if there were no image."""
    assert "is served with text only" in compressed.result("two_sizes_int2")["image"]


def test_lossless_tokens_are_those_of_the_stock_backend(engines: Engines) -> None:
    """Chunked prefill, prefix hits, second turns, and fourteen requests for eight rows."""
    ours, stock = engines.result("two_sizes"), engines.result("two_sizes_stock")
    assert answers(ours) == answers(stock)
    assert logprobs(ours) == pytest.approx(logprobs(stock), abs=1e-3)


def test_two_ranks_mixed_chunks_and_retractions_change_no_token(engines: Engines) -> None:
    """Each rank has one KV head in full-attention layers, and two in the others."""
    ours, stock = engines.result("two_sizes_at_once"), answers(engines.result("two_sizes_stock"))
    found = answers(ours)
    assert found == {name: stock[name] for name in found}
    assert retractions(engines.log("two_sizes_at_once")) > 0


def test_a_second_turn_hits_all_of_the_first(engines: Engines) -> None:
    """A short one takes over the ring of the first, which misses the last token."""
    ours = answers(engines.result("two_sizes"), "cached")
    assert ours["long"] == [DONOR + NEW]
    assert ours["short"] == [DONOR + NEW - 1]


def test_the_reference_notices_layers_that_change_places(
    engines: Engines, reference: WholeReference, donors: list[Served]
) -> None:
    with pytest.raises(AssertionError, match="which leads by"):
        equal_answers(engines.result("two_sizes_swapped")["groups"], reference, donors)


@pytest.mark.parametrize("name", ["two_sizes", "two_sizes_at_once"])
def test_nothing_stays_behind(engines: Engines, name: str) -> None:
    before, after = engines.result(name)["memory"]
    assert before == after
    assert before["kept"] == before["locked"] == 0 < before["tokens"]
