"""Token equality: however stock SGLang schedules, pages, splits or recomputes, lossless slots
change no greedy token.

In lossless mode the slots hold float32 rows in place of codes, so tokens must be those of the stock
backend, with transforms that are neither orthogonal nor equal for two heads. Deliberate bugs show
that the comparison can fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import engine_cases
import pytest
from engine_cases import answers, logprobs, retractions
from engines import Engines, assert_every_hook_ran, needs_sglang

from oscar_zoo.runtime import memory_plan

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

EQUAL = [
    "chunk_256",
    "page_16",
    "mixed_chunk",
    "two_ranks",
    "two_copies",
    "retract",
    "small_pool",
    "least_windows",
    "least_windows_no_tail",
]
MUTANTS = ["no_ring_start", "ring_first", "one_matrix"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("engines"))
    groups = engine_cases.scheduling_groups()
    engine_cases.start(runs, ["stock", *EQUAL, *MUTANTS], groups)
    others = ["experts_stock", "experts", "images_stock", "images"]
    engine_cases.start(runs, others, groups[:3])
    engine_cases.start(runs, ["transformers_stock", "transformers"], groups[:1])
    yield runs
    runs.close()


@pytest.mark.parametrize("name", EQUAL)
def test_tokens_are_those_of_the_stock_backend(engines: Engines, name: str) -> None:
    assert answers(engines.result(name)) == answers(engines.result("stock"))


def test_tokens_of_a_mixture_of_experts_are_those_of_the_stock_backend(engines: Engines) -> None:
    """Its layers ask the backend for the pools, to write keys from inside the rotary embedding
    where they can."""
    ours, stock = engines.result("experts"), engines.result("experts_stock")
    assert answers(ours) == answers(stock)
    assert logprobs(ours) == pytest.approx(logprobs(stock), abs=1e-3)


def test_tokens_of_a_model_that_sglang_runs_with_transformers_are_those_of_the_stock_backend(
    engines: Engines,
) -> None:
    ours, stock = engines.result("transformers"), engines.result("transformers_stock")
    assert answers(ours) == answers(stock)


def test_text_tokens_of_a_model_with_images_are_those_of_the_stock_backend(
    engines: Engines,
) -> None:
    """Its positions have three parts, and its layers belong to a part of the model."""
    ours, stock = engines.result("images"), engines.result("images_stock")
    assert answers(ours) == answers(stock)
    assert logprobs(ours) == pytest.approx(logprobs(stock), abs=1e-3)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_notices(engines: Engines, name: str) -> None:
    assert answers(engines.result(name)) != answers(engines.result("stock"))


def test_the_tables_of_sglang_are_counted_for_every_token_slot(engines: Engines) -> None:
    free_list = 2 * 8  # int64, and a copy while slots are given back
    tables = engines.result("small_pool")["memory"][0]["table_bytes"]
    assert tables + free_list == memory_plan.SLOT_TABLES


@pytest.mark.parametrize("name", [name for name in EQUAL if name != "two_copies"])
def test_nothing_stays_behind(engines: Engines, name: str) -> None:
    before, after = engines.result(name)["memory"]
    assert before == after
    assert before["kept"] == before["locked"] == 0 < before["tokens"]


def test_requests_were_retracted_and_prefixes_evicted(engines: Engines) -> None:
    assert retractions(engines.log("retract")) > 5
    tokens = sum(
        len(ids)
        for group in answers(engines.result("small_pool"), "prompts").values()
        for ids in group
    )
    assert tokens > 2 * engines.result("small_pool")["memory"][0]["tokens"]


def test_every_rank_holds_its_own_heads(engines: Engines) -> None:
    one, (first, second) = (
        engines.result("chunk_256")["reports"][0],
        engines.result("two_ranks")["reports"],
    )
    assert first["transforms"] == second["transforms"] == one["transforms"] // 2
    assert (
        first["facts"]["slot_bytes"]
        == second["facts"]["slot_bytes"]
        == one["facts"]["slot_bytes"] // 2
    )


@pytest.mark.parametrize("name", [name for name in EQUAL if name != "two_copies"])
def test_every_hook_ran_in_every_worker(engines: Engines, name: str) -> None:
    for report in engines.result(name)["reports"]:
        assert_every_hook_ran(report, tail="no_tail" not in name)
