"""Token equality: however stock SGLang schedules, pages, splits or recomputes, lossless slots
change no greedy token, on every release of SGLang that the README names.

In lossless mode the slots hold float32 rows in place of codes, so tokens must be those of the stock
backend, with transforms that are neither orthogonal nor equal for two heads. Deliberate bugs show
that the comparison can fail, with the installed release. The first test of another release is
whether every hook has its place there, so a failure names the release that broke.
"""

from collections.abc import Callable, Iterator

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

EQUAL = [
    "chunk_256",
    "page_16",
    "mixed_chunk",
    "two_ranks",
    "two_copies",
    "retract",
    "small_pool",
    "no_tail",
    "least_windows",
    "least_windows_no_tail",
]
EQUAL_ELSEWHERE = ["fresh_workers", "at_once", "no_tail", "small_pool"]
MUTANTS = ["no_ring_start", "ring_first", "one_matrix"]
OTHERS = [release for release in RELEASES if release != INSTALLED]
RUNS = [(INSTALLED, name) for name in EQUAL] + [(r, n) for r in OTHERS for n in EQUAL_ELSEWHERE]
COUNTED = [run for run in RUNS if run[1] not in ("two_copies", "fresh_workers")]
EXPERTS = [(release, "experts") for release in RELEASES]


Of = Callable[[str], Engines]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Of]:
    """The runs of a release, which begin when a test first asks for one."""
    found: dict[str, Engines] = {}

    def of(release: str) -> Engines:
        if release not in found:
            found[release] = Engines(tmp_path_factory.mktemp("engines"), release)
            _begin(found[release])
        return found[release]

    yield of
    for runs in found.values():
        runs.close()


def _begin(runs: Engines) -> None:
    groups, experts = engine_cases.scheduling_groups(), ["experts_stock", "experts"]
    engine_cases.start(runs, ["idle"], groups[:2])
    if runs.release == INSTALLED:
        engine_cases.start(runs, ["stock", *EQUAL, *MUTANTS], groups)
        engine_cases.start(runs, [*experts, "images_stock", "images"], groups[:3])
        engine_cases.start(runs, ["transformers_stock", "transformers"], groups[:1])
    else:
        engine_cases.start(runs, ["stock", *EQUAL_ELSEWHERE], groups[:4])
        engine_cases.start(runs, experts, groups[:2])


elsewhere = pytest.mark.parametrize("release", OTHERS)
everywhere = pytest.mark.parametrize("release", RELEASES)


def each(runs: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("release", "name"), runs)


@everywhere
def test_every_hook_has_its_place_in_this_release(engines: Of, release: str) -> None:
    run = engines(release).result("idle")
    assert run["version"] == release
    assert run["probe"]["missing"] == [] and run["probe"]["unpatched"] == []
    assert (run["probe"]["dtype"], run["probe"]["written"]) == ("int2", "3")


@elsewhere
def test_the_published_launch_command_is_understood(engines: Of, release: str) -> None:
    runs = engines(release)
    pair = write_folder(runs.folder / "pair", payload())
    (answer,) = runs.call("engine_calls:read", cases=[card(MODEL, pair)])["cases"]
    assert answer["backends"] == ["oscar_int2", None, None]
    assert "group_size 64 (flag)" in answer["settings"]
    assert "sink 64 (environment)" in answer["settings"]
    assert [warning.split("=")[0].split()[0] for warning in answer["warnings"]] == list(NOTED)


@everywhere
def test_an_installed_plugin_changes_nothing_while_unused(engines: Of, release: str) -> None:
    """On a GPU SGLang would write keys from inside the rotary embedding for a pool of bfloat16
    rows. Heads are those for 2, 4 and 8 KV heads on 1, 2, 4 and 8 ranks."""
    stock, idle = engines(release).result("stock"), engines(release).result("idle")
    assert stock["probe"]["patched"] == []
    found, wanted = answers(idle), answers(stock)
    assert found == {name: wanted[name] for name in found}
    assert idle["pool"]["fused_write"] == {"ours": False, "bfloat16": True}
    for heads in idle["heads"]:
        assert heads["ours"] == heads["k"] == heads["v"], heads


@each(RUNS)
def test_tokens_are_those_of_the_stock_backend(engines: Of, release: str, name: str) -> None:
    assert answers(engines(release).result(name)) == answers(engines(release).result("stock"))


@each([*EXPERTS, (INSTALLED, "images"), (INSTALLED, "transformers")])
def test_tokens_of_other_models_are_those_of_stock(engines: Of, release: str, name: str) -> None:
    """Layers of a mixture of experts ask the backend for the pools, to write keys from inside the
    rotary embedding where they can. With images positions have three parts, and layers belong to a
    part of the model. One model SGLang runs with the code of transformers."""
    ours, stock = engines(release).result(name), engines(release).result(f"{name}_stock")
    assert answers(ours) == answers(stock)
    if name != "transformers":
        assert logprobs(ours) == pytest.approx(logprobs(stock), abs=1e-3)


@each([(INSTALLED, name) for name in MUTANTS])
def test_the_comparison_notices(engines: Of, release: str, name: str) -> None:
    assert answers(engines(release).result(name)) != answers(engines(release).result("stock"))


@each([(release, "small_pool") for release in RELEASES])
def test_the_tables_of_sglang_count_for_token_slots(engines: Of, release: str, name: str) -> None:
    free_list = 2 * 8  # int64, and a copy while slots are given back
    tables = engines(release).result(name)["memory"][0]["table_bytes"]
    assert tables + free_list == memory_plan.SLOT_TABLES


@each(COUNTED)
def test_nothing_stays_behind(engines: Of, release: str, name: str) -> None:
    before, after = engines(release).result(name)["memory"]
    assert before == after
    assert before["kept"] == before["locked"] == 0 < before["tokens"]


@each([(INSTALLED, "retract"), *((release, "at_once") for release in OTHERS)])
def test_requests_were_retracted(engines: Of, release: str, name: str) -> None:
    assert retractions(engines(release).log(name)) > (5 if name == "retract" else 0)


def test_prefixes_were_evicted(engines: Of) -> None:
    run = engines(INSTALLED).result("small_pool")
    tokens = sum(len(ids) for group in answers(run, "prompts").values() for ids in group)
    assert tokens > 2 * run["memory"][0]["tokens"]


def test_every_rank_holds_its_own_heads(engines: Of) -> None:
    runs = engines(INSTALLED)
    (one,), ranks = (runs.result(name)["reports"] for name in ("chunk_256", "two_ranks"))
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["transforms"] == one["transforms"] // 2
        assert rank["facts"]["slot_bytes"] == one["facts"]["slot_bytes"] // 2


@each([run for run in RUNS if run[1] != "two_copies"])
def test_every_hook_ran_in_every_worker(engines: Of, release: str, name: str) -> None:
    for report in engines(release).result(name)["reports"]:
        assert_every_hook_ran(report, tail="no_tail" not in name)
