"""Every release of SGLang that the README names and that is not the installed one.

The first test of a release is whether every hook has its place there, so a failure names the release that broke.
"""

from __future__ import annotations

from collections.abc import Iterator

import engine_cases
import pytest
from engine_cases import answers, retractions
from engines import INSTALLED, RELEASES, Engines, needs_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

EQUAL = ["fresh_workers", "at_once", "no_tail", "small_pool"]


@pytest.fixture(scope="module", params=[release for release in RELEASES if release != INSTALLED])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    runs = Engines(tmp_path_factory.mktemp("engines"), request.param)
    engine_cases.start(runs, ["idle", "stock", *EQUAL, "stale_rows"], engine_cases.scheduling_groups())
    yield runs
    runs.close()


def test_every_hook_has_its_place_in_this_release(engines: Engines) -> None:
    run = engines.result("idle")
    assert run["version"] == engines.release
    assert run["probe"]["missing"] == [] and run["probe"]["unpatched"] == []
    assert (run["probe"]["dtype"], run["probe"]["written"]) == ("int2", "3")


def test_an_installed_plugin_changes_nothing_while_it_is_not_used(engines: Engines) -> None:
    stock, idle = engines.result("stock"), engines.result("idle")
    assert stock["probe"]["patched"] == []
    assert answers(idle) == answers(stock)


@pytest.mark.parametrize("name", EQUAL)
def test_tokens_are_those_of_the_stock_backend(engines: Engines, name: str) -> None:
    assert answers(engines.result(name)) == answers(engines.result("stock"))


def test_the_comparison_notices_stale_rows(engines: Engines) -> None:
    assert answers(engines.result("stale_rows")) != answers(engines.result("stock"))


@pytest.mark.parametrize("name", EQUAL)
def test_every_hook_ran_in_every_worker(engines: Engines, name: str) -> None:
    wanted = {"kv_dtype", "slot_bytes", "budget", "rows", "pool", "alloc", "match", "admit", "release"}
    for report in engines.result(name)["reports"]:
        assert {*report["fired"]} - {"flush"} == (wanted if name == "no_tail" else wanted | {"tail"})


def test_nothing_stays_behind(engines: Engines) -> None:
    assert retractions(engines.log("at_once")) > 0
    for name in ("at_once", "no_tail", "small_pool"):
        before, after = engines.result(name)["memory"]
        assert before == after and before["kept"] == before["locked"] == 0


def test_heads_of_a_rank_are_those_that_it_loads(engines: Engines) -> None:
    """For 2, 4 and 8 KV heads on 1, 2, 4 and 8 ranks, also where several ranks hold one head."""
    for found in engines.result("idle")["heads"]:
        assert found["ours"] == found["k"] == found["v"], found
