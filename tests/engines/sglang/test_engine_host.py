"""Pages of the INT2 cache in the host's memory, behind SGLang's own hierarchical cache: prompts
that the GPU had no room for any more come back as they were, on every release.

The pool on the device holds four of the prompts. With exact rows beside the codes, tokens must be
those of the stock backend without a host tier. With codes alone, the first token of a second visit
must have the probability that it has behind pages that never left; later tokens may read others,
because the end of a prompt is prefilled again. Pages come back when somebody waits for them, and
not before.
"""

from collections.abc import Callable, Iterator
from typing import Any

import engine_cases
import pytest
from engine_cases import DONOR, RECENT, answers, retractions
from engines import INSTALLED, RELEASES, Engines, assert_every_hook_ran, needs_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

MANY, FEW, NEW, PAGE = 40, 12, 4, 16
REACH = (DONOR - RECENT) // PAGE * PAGE
"""Tokens of a prompt that a second visit finds."""
Of = Callable[[str], Engines]
OTHERS = [release for release in RELEASES if release != INSTALLED]
LOSSLESS = [(INSTALLED, "host_at_once"), *((release, "host") for release in RELEASES)]
WAITS = ["host_no_wait", "host_first_wait"]
FIRST = [
    {**group, "name": f"{group['name']}-{at}", "prompts": [prompt]}
    for group in engine_cases.visits(FEW, new=NEW)[: FEW // 4]
    for at, prompt in enumerate(group["prompts"])
]
ALONE = [*FIRST, *({**group, "name": f"{group['name']}-again"} for group in FIRST[::-1])]
"""One request at a time, and the last one first again: the host has forgotten the first ones."""
CODES = ["visits_int2", "host_int2", "host_codes_alone", "visits_mixed", "host_mixed"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Of]:
    """The runs of a release, which begin when a test first asks for one."""
    found: dict[str, Engines] = {}

    def of(release: str) -> Engines:
        if release not in found:
            runs = found[release] = Engines(tmp_path_factory.mktemp("engines"), release)
            few = engine_cases.visits(FEW, new=NEW)
            many = engine_cases.visits(MANY, new=NEW) if release == INSTALLED else few
            engine_cases.start(runs, ["visits_stock", "host"], many)
            engine_cases.start(runs, ["host_events"], ALONE)
            if release == INSTALLED:
                engine_cases.start(runs, ["host_no_sinks", *WAITS], few)
                given_up = engine_cases.visits(FEW, new=NEW, given_up=True)
                engine_cases.start(runs, ["host_at_once"], given_up)
                engine_cases.start(runs, CODES, engine_cases.visits(8, new=1))
        return found[release]

    yield of
    for runs in found.values():
        runs.close()


def second(run: Any, what: str) -> dict[str, Any]:
    return {name: found for name, found in answers(run, what).items() if "second" in name}


def differ(run: Any, stock: Any) -> list[str]:
    """Groups with another answer than the stock backend gives; one that was given up is the
    beginning of one."""
    wanted = answers(stock)
    return [
        name
        for name, group in answers(run).items()
        if any(
            whole[: len(found)] != found for found, whole in zip(group, wanted[name], strict=True)
        )
    ]


@pytest.mark.parametrize(("release", "name"), LOSSLESS)
def test_what_was_evicted_comes_back_from_the_host(engines: Of, release: str, name: str) -> None:
    run = engines(release).result(name)
    assert differ(run, engines(release).result("visits_stock")) == []
    whole = [found for group in second(run, "cached").values() for found in group if found]
    assert set(whole) == {REACH}
    before, after = run["memory"]
    assert before == after and before["storage"][0] is False
    for report in run["reports"]:
        assert "host_pool" in report["fired"]
        assert_every_hook_ran({"fired": {*report["fired"]} - {"host_pool"}}, tail=True)
        assert report["sinks"]["host_hits"] > 0 and report["sinks"]["forced_misses"] == 0


@pytest.mark.parametrize("release", RELEASES)
def test_every_second_visit_is_a_hit(engines: Of, release: str) -> None:
    run = engines(release).result("host")
    assert all(found == [REACH] * 4 for found in second(run, "cached").values())
    stock = engines(release).result("visits_stock")
    assert not any(map(any, second(stock, "cached").values())), "the pool held them all"


def test_requests_were_retracted_and_given_up_while_pages_came_back(engines: Of) -> None:
    run = engines(INSTALLED).result("host_at_once")
    assert len(run["reports"]) == 2
    assert retractions(engines(INSTALLED).log("host_at_once")) > 0
    assert "abort" in {kind for group in second(run, "ended").values() for kind in group}


def test_without_first_tokens_on_the_host_nothing_is_reused(engines: Of) -> None:
    run = engines(INSTALLED).result("host_no_sinks")
    assert differ(run, engines(INSTALLED).result("visits_stock")) == []
    assert not any(map(any, second(run, "cached").values()))
    assert run["reports"][0]["sinks"]["forced_misses"] == FEW


@pytest.mark.parametrize("name", WAITS)
def test_somebody_must_wait_for_every_layer_of_a_page(engines: Of, name: str) -> None:
    found = engines(INSTALLED).result(name)
    broken = differ(found, engines(INSTALLED).result("visits_stock"))
    assert broken and all("second" in name for name in broken)


@pytest.mark.parametrize("bits", ["int2", "mixed"])
def test_codes_and_parameters_come_back_to_the_last_bit(engines: Of, bits: str) -> None:
    here, host = (engines(INSTALLED).result(f"{where}_{bits}") for where in ("visits", "host"))
    assert second(here, "cached") == second(host, "cached")
    assert answers(here, "logprobs") == answers(host, "logprobs")


def test_the_engine_tells_what_the_host_holds_and_brings_back(engines: Of) -> None:
    told = engines(INSTALLED).result("host_int2")["metrics"]
    value = {sample["name"]: sample["value"] for sample in told}
    assert value["sglang:hicache_host_total_tokens"] == 16 * 768
    assert value["sglang:load_back_tokens_total"] == 8 * REACH


def test_the_comparison_notices_a_pool_that_forgets_parameters(engines: Of) -> None:
    here, broken = (
        second(engines(INSTALLED).result(name), "logprobs")
        for name in ("visits_int2", "host_codes_alone")
    )
    assert all(here[name] != broken[name] for name in here)


@pytest.mark.parametrize("release", RELEASES)
def test_published_events_tell_what_a_hit_finds(engines: Of, release: str) -> None:
    """A router that adds them up knows the pages of a prompt that some tier holds. A hit takes all
    of them, but for the recent window."""
    held: dict[str, dict[int, tuple[int, ...]]] = {}  # by tier and hash: parent and tokens
    kinds, foretold = set[str](), list[int]()
    for group in engines(release).result("host_events")["groups"].values():
        (prompt,), (cached,) = group["prompts"], group["cached"]
        known = {page: one for tier in held.values() for one, page in tier.items()}
        parent, found = 0, 0
        while found < REACH and (page := (parent, *prompt[found : found + PAGE])) in known:
            parent, found = known[page], found + PAGE
        foretold.append(found)
        assert cached == found
        for event in group["events"]:
            tier = held.setdefault(event["medium"], {})
            kinds.add(f"{event['kind']} {event['medium']}")
            parent, ids = event.get("parent_block_hash") or 0, event.get("token_ids", ())
            for at, one in enumerate(event["block_hashes"]):
                if event["kind"] == "BlockRemoved":
                    del tier[one]
                else:
                    tier[one] = (parent, *ids[at * PAGE : (at + 1) * PAGE])
                parent = one
    assert {*foretold[FEW:]} == {0, REACH}
    changes = "BlockStored", "BlockRemoved"
    assert kinds == {f"{one} {tier}" for one in changes for tier in ("GPU", "CPU_PINNED")}
