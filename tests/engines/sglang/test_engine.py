"""The plugin inside stock SGLang on the CPU, with the example model: hits, first tokens, refusals,
memory.

In lossless mode the slots hold float32 rows, so greedy tokens must equal those of the stock
backend, whatever was evicted. `test_engine_tokens` compares them in every kind of batch. Runs with
nonsense in the slots, and with a bug, show that windows are really read.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from cache_oracle import general_set
from engines import (
    ENGINE,
    Engines,
    assert_every_hook_ran,
    eviction_groups,
    needs_sglang,
    plumbing_groups,
    report_of,
    text_tokens,
    window_groups,
)
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.artifact.writer import rotation_bytes

# An Engine starts in 10 to 20 seconds on two idle cores, and in minutes on busy ones.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

SINK, RECENT = 16, 32
INT2 = {"kv_cache_dtype": "int2"}
STOCK = {"attention_backend": "torch_native"}
WINDOWS = {"OSCAR_INT2_SINK_SIZE": str(SINK), "OSCAR_INT2_RECENT_SIZE": str(RECENT)}
GROUPS = ["first", "again", "turn2", "longer", "many"]
WINDOW_GROUPS = ["alone", "donor", "sharing"]
EVICTION_GROUPS = ["made", "shared", "others", "gone"]


def test_mode(mode: str, **extra: str) -> dict[str, str]:
    """Variables of a mode of `int2_test_plugin`."""
    return {**WINDOWS, "INT2_TEST_MODE": mode, **extra}


test_mode.__test__ = False  # type: ignore[attr-defined]

ROTATIONS = {"OSCAR_INT2_ROTATION_PATH": "ORTHOGONAL"}
REFUSED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({}, {}, "--kv-cache-dtype int2 needs the rotations of an artifact"),
    ({"enable_hierarchical_cache": True, "page_size": 8}, ROTATIONS, "--page-size"),
    ({"attention_backend": "torch_native"}, ROTATIONS, "--attention-backend"),
    ({"enable_memory_saver": True}, ROTATIONS, "--enable-memory-saver"),
    ({}, {**ROTATIONS, "SGLANG_OSCAR_K_CLIP": "1"}, "no setting is called"),
    ({}, {"OSCAR_INT2_ROTATION_PATH": "/nowhere"}, "no such folder of rotations"),
    (
        {"kv_cache_dtype": "auto", **STOCK},
        {"OSCAR_INT2_SINK_SIZE": "3", "OSCAR_INT2_FROM_FLAGS": "OSCAR_INT2_SINK_SIZE"},
        "--oscar-sink-size needs --kv-cache-dtype int2",
    ),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("engines")
    orthogonal = write_folder(folder / "orthogonal", artifact_files())
    general = write_folder(
        folder / "general",
        {f"{s}.pt": rotation_bytes(general_set(s, 4, 2, 64, seed=i)) for i, s in enumerate("kv")},
    )
    groups, windows = plumbing_groups(text_tokens()), window_groups(text_tokens(), SINK)
    evictions = eviction_groups(text_tokens(), 96)
    few_blocks = {"OSCAR_INT2_SINK_SIZE": "96", "OSCAR_INT2_RECENT_SIZE": "8"}
    few_blocks["OSCAR_INT2_IDLE_SINKS"] = "0"
    tail_off = {"OSCAR_INT2_ROTATION_PATH": str(orthogonal), "OSCAR_INT2_WINDOW_ON_HIT": "int2"}
    runs = Engines(folder)
    refused = [
        {
            "engine": {**INT2, **engine},
            "env": {n: v.replace("ORTHOGONAL", str(orthogonal)) for n, v in env.items()},
        }
        for engine, env, _ in REFUSED
    ]
    runs.start(
        "stock",
        env={"SGLANG_PLUGINS": "none"},
        job={"engine": STOCK, "groups": [*groups, *windows, *evictions]},
    )
    runs.start(
        "lossless",
        env=test_mode("lossless", OSCAR_INT2_ROTATION_PATH=str(general)),
        job={"engine": {**INT2, "max_running_requests": None}, "groups": groups},
    )
    idle = {"engine": STOCK, "groups": [], "probe": True, "refused": refused}
    runs.start("idle", env={}, job=idle)
    runs.start(
        "poison",
        env={**test_mode("poison", **tail_off), "OSCAR_INT2_RECENT_SIZE": "512"},
        job={"engine": INT2, "groups": windows},
    )
    for name, mutant in (("few_blocks", ""), ("host_blocks", ""), ("early", "publish_early")):
        host = "8" if name == "host_blocks" else "0"
        own = {"INT2_TEST_MUTANT": mutant, "OSCAR_INT2_HOST_SINKS": host}
        mode = test_mode("lossless", OSCAR_INT2_ROTATION_PATH=str(orthogonal), **own)
        engine = {**INT2, "max_running_requests": 3}
        runs.start(name, env={**mode, **few_blocks}, job={"engine": engine, "groups": evictions})
    yield runs
    runs.close()


def answers(
    run: dict[str, Any], what: str = "tokens", names: Sequence[str] = GROUPS
) -> dict[str, Any]:
    return {name: run["groups"][name][what] for name in names}


def test_what_cannot_be_served_does_not_start(engines: Engines) -> None:
    for said, (_, _, text) in zip(engines.result("idle")["refused"], REFUSED, strict=True):
        assert text in said


def test_a_hit_leaves_the_window_to_prefill(engines: Engines) -> None:
    """But for a short turn, which takes over the ring of the request that it goes on from."""
    assert answers(engines.result("lossless")) == answers(engines.result("stock"))
    stock, ours = (answers(engines.result(name), "cached") for name in ("stock", "lossless"))
    prompts = answers(engines.result("stock"), "prompts")
    assert ours["turn2"][0] == len(prompts["turn2"][0]) - 5 - 1 > 100
    assert ours["longer"] == [9 + 24 - 1]  # behind a prompt of 9 and its answer
    for name in ("again", "turn2"):
        for index, (prompt, hit) in enumerate(zip(prompts[name], stock[name], strict=True)):
            if (name, index) != ("turn2", 0):
                assert ours[name][index] == max(0, min(hit, len(prompt) - RECENT))


@pytest.mark.parametrize("name", ["lossless", "few_blocks"])
def test_a_hit_keeps_its_first_tokens(engines: Engines, name: str) -> None:
    report = report_of(engines.result(name))
    assert report["reads"]["slot"] > report["reads"]["slot_sink"] == 0
    assert report["sinks"]["hits"] > 0 == report["sinks"]["lost"]


def test_a_lost_block_makes_the_prompt_start_again(engines: Engines) -> None:
    run, stock = engines.result("few_blocks"), engines.result("stock")
    assert answers(run, names=EVICTION_GROUPS) == answers(stock, names=EVICTION_GROUPS)
    prompts, cached = (answers(run, what, EVICTION_GROUPS) for what in ("prompts", "cached"))
    assert cached["shared"] == [len(prompt) - 8 for prompt in prompts["shared"]]
    assert cached["gone"][:2] == [0, 0]
    assert answers(stock, "cached", EVICTION_GROUPS)["gone"][1] > 96
    assert report_of(run)["sinks"]["forced_misses"] >= 1


def test_a_lost_block_comes_back_from_the_host(engines: Engines) -> None:
    run, stock = engines.result("host_blocks"), engines.result("stock")
    assert answers(run, names=EVICTION_GROUPS) == answers(stock, names=EVICTION_GROUPS)
    assert answers(run, "cached", EVICTION_GROUPS)["gone"][1] > 96
    sinks = report_of(run)["sinks"]
    assert sinks["host_hits"] >= 1 and sinks["forced_misses"] == sinks["lost"] == 0


def test_a_block_shared_too_early_is_noticed(engines: Engines) -> None:
    """By the hit: the rest of the block may be written before the next request reads it, so the
    tokens may be right by luck."""
    early, right = (
        answers(engines.result(name), "cached", EVICTION_GROUPS) for name in ("early", "few_blocks")
    )
    assert {name for name in early if early[name] != right[name]} == {"gone"}


def test_windows_are_really_read(engines: Engines) -> None:
    """Every slot holds nonsense; the last two prompts find exactly their first tokens in the prefix
    cache."""
    run, stock = engines.result("poison"), engines.result("stock")
    assert answers(run, names=WINDOW_GROUPS) == answers(stock, names=WINDOW_GROUPS)
    assert run["groups"]["sharing"]["cached"] == [SINK, SINK]
    report = report_of(run)
    assert report["sinks"]["hits"] == 2
    assert report["reads"]["slot"] == 0
    assert min(report["reads"][name] for name in ("extend", "decode", "ring", "sink")) > 0


@pytest.mark.parametrize("name", ["lossless", "poison"])
def test_every_hook_ran_in_the_worker(engines: Engines, name: str) -> None:
    (report,) = engines.result(name)["reports"]
    assert_every_hook_ran(report, tail=name == "lossless")


@pytest.mark.parametrize("name", ["lossless", "poison", "few_blocks"])
def test_memory_is_what_was_taken_from_the_budget(engines: Engines, name: str) -> None:
    (report,) = engines.result(name)["reports"]
    facts = report["facts"]
    held = report["window_store"] + report["transforms"] + report["scratch"]
    assert facts["subtracted"] == held
    assert report["slot_store"] == (report["tokens"] + 1) * facts["slot_bytes"]
    assert report["kv_size"] == report["slot_store"] + report["window_store"]
    rows = {"lossless": 65, "few_blocks": 4}.get(name, ENGINE["max_running_requests"] + 1)
    assert report["rows"] == rows
    assert report["blocks"] == (rows if name == "few_blocks" else 2 * rows - 1)


def test_the_pool_keeps_its_contract(engines: Engines) -> None:
    pool = engines.result("idle")["pool"]
    assert pool["bytes"] == pool["allocated"] > 0
    assert pool["slots"] == 32 + 4
    assert pool["probes"] == [[0, 2, 64]] * 4
    assert pool["moved"]
    assert pool["fused_write"] == {"ours": False, "bfloat16": True}
    assert len(pool["refused"]) == 5
    assert all(
        text == f"oscar-zoo INT2 KV cache: {name} is not supported"
        for name, text in pool["refused"].items()
    )


def test_every_run_had_its_mode(engines: Engines) -> None:
    asked = {"lossless": "lossless", "poison": "poison", "few_blocks": "lossless"}
    assert {name: report_of(engines.result(name))["mode"] for name in asked} == asked
    for name in (*asked, "early"):
        bug = "publish_early" if name == "early" else ""
        assert report_of(engines.result(name))["mutant"] == bug
