"""Every release of SGLang that the README names and that is not the installed one.

The first test of a release is whether every hook has its place there, so a failure names the
release that broke. That the comparisons can fail is shown with the installed release.
"""

from __future__ import annotations

from collections.abc import Iterator

import engine_cases
import pytest
from engine_cases import answers, logprobs, retractions
from engines import (
    INSTALLED,
    MODEL,
    NOTED,
    RELEASES,
    Engines,
    assert_every_hook_ran,
    card,
    needs_sglang,
)
from tiny_artifacts import payload, write_folder

from oscar_zoo.runtime import memory_plan

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

EQUAL = ["fresh_workers", "at_once", "no_tail", "small_pool"]


@pytest.fixture(scope="module", params=[release for release in RELEASES if release != INSTALLED])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("engines"), request.param)
    groups = engine_cases.scheduling_groups()[:4]
    engine_cases.start(runs, ["idle"], groups[:2])
    engine_cases.start(runs, ["stock", *EQUAL], groups)
    engine_cases.start(runs, ["experts_stock", "experts"], groups[:2])
    yield runs
    runs.close()


def test_every_hook_has_its_place_in_this_release(engines: Engines) -> None:
    run = engines.result("idle")
    assert run["version"] == engines.release
    assert run["probe"]["missing"] == [] and run["probe"]["unpatched"] == []
    assert (run["probe"]["dtype"], run["probe"]["written"]) == ("int2", "3")


def test_the_published_launch_command_is_understood(engines: Engines) -> None:
    pair = write_folder(engines.folder / "pair", payload())
    (answer,) = engines.call("engine_calls:read", cases=[card(MODEL, pair)])["cases"]
    assert answer["backends"] == ["oscar_int2", None, None]
    assert "group_size 64 (flag)" in answer["settings"]
    assert "sink 64 (environment)" in answer["settings"]
    assert [warning.split("=")[0].split()[0] for warning in answer["warnings"]] == list(NOTED)


def test_an_installed_plugin_changes_nothing_while_it_is_not_used(engines: Engines) -> None:
    stock, idle = engines.result("stock"), engines.result("idle")
    assert stock["probe"]["patched"] == []
    found, wanted = answers(idle), answers(stock)
    assert found == {name: wanted[name] for name in found}


@pytest.mark.parametrize("name", EQUAL)
def test_tokens_are_those_of_the_stock_backend(engines: Engines, name: str) -> None:
    assert answers(engines.result(name)) == answers(engines.result("stock"))


def test_tokens_of_a_mixture_of_experts_are_those_of_the_stock_backend(engines: Engines) -> None:
    ours, stock = engines.result("experts"), engines.result("experts_stock")
    assert answers(ours) == answers(stock)
    assert logprobs(ours) == pytest.approx(logprobs(stock), abs=1e-3)


def test_keys_are_never_written_from_inside_the_rotary_embedding(engines: Engines) -> None:
    """On a GPU SGLang would do so for a pool of bfloat16 rows."""
    assert engines.result("idle")["pool"]["fused_write"] == {"ours": False, "bfloat16": True}


@pytest.mark.parametrize("name", EQUAL)
def test_every_hook_ran_in_every_worker(engines: Engines, name: str) -> None:
    for report in engines.result(name)["reports"]:
        assert_every_hook_ran(report, tail=name != "no_tail")


def test_the_tables_of_sglang_are_counted_for_every_token_slot(engines: Engines) -> None:
    free_list = 2 * 8  # int64, and a copy while slots are given back
    tables = engines.result("small_pool")["memory"][0]["table_bytes"]
    assert tables + free_list == memory_plan.SLOT_TABLES


def test_nothing_stays_behind(engines: Engines) -> None:
    assert retractions(engines.log("at_once")) > 0
    for name in ("at_once", "no_tail", "small_pool"):
        before, after = engines.result(name)["memory"]
        assert before == after and before["kept"] == before["locked"] == 0


def test_heads_of_a_rank_are_those_that_it_loads(engines: Engines) -> None:
    """For 2, 4 and 8 KV heads on 1, 2, 4 and 8 ranks, also where several ranks hold one head."""
    for found in engines.result("idle")["heads"]:
        assert found["ours"] == found["k"] == found["v"], found
