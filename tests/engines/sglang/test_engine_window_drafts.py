"""Speculative decoding of models whose layers partly have a sliding window, on the CPU: a small
Gemma 3, and a small gpt-oss with learned sinks.

Greedy tokens are those of a server without drafts: in windows smaller than a prompt and than its
answer, through chunked prefill, prefix hits, second turns, ten requests at once, and requests that
are retracted or given up. The sliding layers run in `SlidingOnCpu`, in the place of SGLang's
Triton backend. Runs with a bug show that the comparison can fail.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from draft_runs import (
    BRANCHES,
    CHAIN,
    COUNT,
    DRAFT_MODEL,
    DRAFTS,
    EAGLE3,
    LOSSLESS,
    STANDALONE,
    WINDOWS,
    Runs,
    alone,
    together,
)
from engine_cases import FREE_AT_ONCE, RECENT, RETRACT, WINDOW, model, retractions
from engines import CHUNK, ENGINE, INSTALLED, RELEASES, needs_sglang, report_of

from oscar_zoo.runtime.memory_plan import SLIDING_TABLES, SLOT_TABLES
from oscar_zoo.runtime.slot_plans import SlidingDemand

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

GEMMA, GPT_OSS = "gemma3_text", "gpt_oss"
EXACT, INT2 = {**LOSSLESS, **FREE_AT_ONCE}, {**WINDOWS, **FREE_AT_ONCE}
MUTANTS = ("one_sliding_window", "every_draft_seen")
SHORT = 10
"""Tokens of an answer through kernels that Triton's interpreter runs."""
FEW_SLOTS = {"tp_size": 2, "swa_full_tokens_ratio": 0.2, "page_size": 16}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("drafts"))
    gemma, gpt_oss = (model(made.folder / name, name) for name in (GEMMA, GPT_OSS))
    chain, own = ({**one, "model_path": str(gemma)} for one in (CHAIN, STANDALONE))
    own["speculative_draft_model_path"] = str(gemma)
    windowed = {**STANDALONE, "model_path": str(gpt_oss)}
    windowed["speculative_draft_model_path"] = str(gpt_oss)
    trees = [{**one, "model_path": str(gemma)} for one in (DRAFTS, BRANCHES)]
    groups = [*alone(), *together()]
    made.plain("exact", EXACT, groups, model=gemma)
    made.drafts("chain", EXACT, groups, of="exact", engine=chain, shape="chains", memory=True)
    made.drafts("own", EXACT, groups, of="exact", engine=own)
    crowded = {**chain, **FEW_SLOTS}
    made.drafts(
        "crowded", {**EXACT, **RETRACT}, groups[-3:], of="exact", engine=crowded, shape="chains"
    )
    for mutant in MUTANTS:
        env = {**EXACT, "INT2_TEST_MUTANT": mutant}
        made.drafts(mutant, env, alone(2), of="exact", engine=chain, shape="chains")
    made.plain("int2", INT2, alone(), model=gemma)
    made.drafts("int2_chain", INT2, alone(), of="int2", engine=chain, shape="chains")
    refused = [{"engine": one} for one in (*trees, windowed)]
    made.plain("sinks", INT2, alone(), model=gpt_oss, refused=refused)
    engine = {**CHAIN, "model_path": str(gpt_oss)}
    made.drafts("sinks_chain", INT2, alone(), of="sinks", engine=engine, shape="chains")
    (made.folder / "eagle3").mkdir()
    longer = {**DRAFT_MODEL, "max_position_embeddings": 4096}  # as gpt-oss
    (made.folder / "eagle3/config.json").write_text(json.dumps(longer))
    eagle: dict[str, Any] = {**EAGLE3, "model_path": str(gpt_oss)}
    eagle["speculative_draft_model_path"] = str(made.folder / "eagle3")
    made.drafts("sinks_eagle3", INT2, alone(), of="sinks", engine=eagle)
    little = {**eagle, "max_total_tokens": 640, "max_running_requests": 2}
    made.drafts("little", INT2, alone(1), of="sinks", engine=little)
    short = [{**one, "new": SHORT} for one in alone(1, 2)]
    made.plain("sliding", EXACT, short, model=gpt_oss)
    env = {**EXACT, "INT2_TEST_SLIDING": "triton", "INT2_TEST_MUTANT": "stock_window"}
    made.plain("stock_window", env, short, model=gpt_oss)
    for name in ("triton", "graphs"):
        env = {**EXACT, "INT2_TEST_SLIDING": name}
        made.plain(name, env, short, model=gpt_oss)
        made.drafts(f"{name}_chain", env, short, of="sliding", engine=engine, shape="chains")
        made.drafts(f"{name}_eagle3", env, short, of="sliding", engine=eagle)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["chain", "own", "crowded"])
def test_lossless_tokens_are_those_of_plain_greedy_decoding(runs: Runs, name: str) -> None:
    assert set(runs.different(name, "exact")) <= {"given_up"}
    got, want = (runs.result(one)["groups"]["given_up"] for one in (name, "exact"))
    assert got["ended"] == want["ended"] == ["length", "abort", "length"]
    assert [got["tokens"][i] for i in (0, 2)] == [want["tokens"][i] for i in (0, 2)]


def test_drafts_are_accepted_and_rejected(runs: Runs) -> None:
    """Where they are written: a chain is never moved."""
    counts = runs.counts("chain")
    assert 1.3 * counts["steps"] < counts["accepted"] < 0.8 * COUNT * counts["steps"]
    assert counts["moved"] == 0


@pytest.mark.parametrize(
    ("name", "of"), [("int2_chain", "int2"), ("sinks_chain", "sinks"), ("sinks_eagle3", "sinks")]
)
def test_int2_tokens_and_log_probabilities_are_of_decoding(runs: Runs, name: str, of: str) -> None:
    assert runs.different(name, of) == []
    for group, wanted in runs.result(of)["groups"].items():
        (got,), (want,) = runs.result(name)["groups"][group]["logprobs"], wanted["logprobs"]
        assert got == pytest.approx(want, abs=2e-3)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_bug_changes_tokens(runs: Runs, mutant: str) -> None:
    assert runs.different(mutant, "exact") == ["alone2"]


@pytest.mark.parametrize("drafts", ["", "_chain", "_eagle3"])
@pytest.mark.parametrize("name", ["triton", "graphs"])
def test_the_backend_of_a_gpu_gives_the_same_tokens(runs: Runs, name: str, drafts: str) -> None:
    """As prepared for every step, and as in front of a CUDA graph. Also without drafts."""
    name += drafts
    assert runs.different(name, "sliding") == []
    for group, wanted in runs.result("sliding")["groups"].items():
        (got,), (want,) = runs.result(name)["groups"][group]["logprobs"], wanted["logprobs"]
        assert got == pytest.approx(want, abs=1e-4)


def test_the_comparison_notices_a_window_that_is_one_token_short(runs: Runs) -> None:
    """That of SGLang's decode steps. A request within one window shows nothing."""
    assert runs.different("stock_window", "sliding") == ["alone2"]


def test_what_does_not_work_is_refused_before_weights_are_loaded(runs: Runs) -> None:
    *trees, windowed = runs.result("sinks")["refused"]
    for said in trees:
        assert "a tree of drafts does not work with an INT2 KV cache of this model" in said
        assert "SGLang moves a sliding window by the place of a draft in the step" in said
    assert "the draft model does not work beside an INT2 KV cache: its layers with a" in windowed
    assert len(trees) == 2


@pytest.mark.parametrize(
    ("name", "each"), [("own", 4 * 2 * 2 * 64 * 4), ("sinks_eagle3", 1 * 2 * 64 * 4), ("chain", 0)]
)
def test_a_token_slot_counts_the_cache_of_the_draft_model(runs: Runs, name: str, each: int) -> None:
    """Layers, KV heads, K and V of 64 channels, in float32. Its runner has tables of its own. They
    leave fewer slots of both kinds."""
    report = report_of(runs.result(name))
    facts = report["facts"]
    assert facts["draft_bytes"] == each
    tables = SLOT_TABLES * (2 if each else 1)
    demand = SlidingDemand(
        token=facts["slot_bytes"] + each + tables,
        plain_token=2 * 2 * 2 * 64 * 4 + each + (SLOT_TABLES if each else 0),
        sliding=2 * 2 * 2 * 64 * 4 + SLIDING_TABLES,
        ratio=0.8,
        one_request=0,
        all_requests=0,
    )
    plan = demand.divide(facts["profiled"] - facts["subtracted"])
    wanted = demand.limit(plan, ENGINE["max_total_tokens"]).sliding
    assert facts["sliding"]["slots"] == pytest.approx(wanted, abs=1)


def test_the_sliding_pool_has_room_for_the_drafts_of_every_request(runs: Runs) -> None:
    """For each of two: the window, what a prefix hit leaves to prefill, pages that are not full,
    and the drafts of two steps, with which SGLang runs ahead. Then two chunks of a prompt."""
    sliding = report_of(runs.result("little"))["facts"]["sliding"]
    held = (WINDOW - 1) + RECENT + 2 + 2 * 4
    assert sliding["slots"] == 2 * held + 2 * CHUNK
    assert runs.different("little", "sinks") == []


def test_nothing_stays_behind(runs: Runs) -> None:
    before, after = runs.result("chain")["memory"]
    assert before == after
    assert before["kept"] == before["locked"] == 0 < before["tokens"]
    assert retractions(runs.engines[""].log("crowded")) > 0


@pytest.mark.parametrize("release", [one for one in RELEASES if one != INSTALLED])
def test_other_releases_verify_the_same(runs: Runs, release: str) -> None:
    """In `SlidingOnCpu`, and with the code that a GPU runs."""
    chain, sinks = ({**CHAIN, "model_path": str(runs.folder / name)} for name in (GEMMA, GPT_OSS))
    own = {**STANDALONE, "model_path": str(runs.folder / GEMMA)}
    own["speculative_draft_model_path"] = own["model_path"]
    exact, int2, on_gpu = (f"{name}@{release}" for name in ("chain", "own", "graphs"))
    env = {**EXACT, "INT2_TEST_SLIDING": "graphs"}
    short = [{**one, "new": SHORT} for one in alone(1, 2)]
    groups = [*alone(), *together()[:3]]
    made = {"release": release, "shape": "chains"}
    runs.drafts(exact, EXACT, groups, of="exact", engine=chain, **made)
    runs.drafts(int2, INT2, alone(), of="int2", engine=own, **made)
    runs.drafts(on_gpu, env, short, of="sliding", engine=sinks, **made)
    assert runs.different(exact, "exact") == []
    assert runs.different(int2, "int2") == []
    assert runs.different(on_gpu, "sliding") == []
