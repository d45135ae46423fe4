"""The plugin inside stock SGLang on the CPU, with the example model: plumbing, inertness, refusals, memory.

In lossless mode the slots hold float32 rows, so greedy tokens must equal those of the stock backend through chunked
prefill, prefix hits, second turns and queues, with a transform that is not orthogonal. Two runs are there to show
that this comparison can fail, and that rings and sinks are really read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cache_oracle import general_set
from engines import ENGINE, Engines, needs_sglang, plumbing_groups, text_tokens
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.artifact.writer import rotation_bytes

pytestmark = [pytest.mark.sglang, needs_sglang]

SINK, RECENT = 16, 32
INT2 = {"kv_cache_dtype": "int2"}
STOCK = {"attention_backend": "torch_native"}
WINDOWS = {"OSCAR_INT2_SINK_SIZE": str(SINK), "OSCAR_INT2_RECENT_SIZE": str(RECENT)}
GROUPS = ["first", "again", "turn2", "many"]


def test_mode(mode: str, **extra: str) -> dict[str, str]:
    """Variables of a test mode."""
    return {**WINDOWS, "OSCAR_INT2_TEST_MODE": mode, "OSCAR_INT2_ALLOW_TEST_MODES": "1", **extra}


test_mode.__test__ = False  # type: ignore[attr-defined]

REFUSED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({}, {}, "--kv-cache-dtype int2 needs the rotations of an artifact"),
    ({"enable_hierarchical_cache": True}, {"OSCAR_INT2_ROTATION_PATH": "ORTHOGONAL"}, "--enable-hierarchical-cache"),
    ({"attention_backend": "torch_native"}, {"OSCAR_INT2_ROTATION_PATH": "ORTHOGONAL"}, "--attention-backend"),
    ({"enable_memory_saver": True}, {"OSCAR_INT2_ROTATION_PATH": "ORTHOGONAL"}, "--enable-memory-saver"),
    ({}, {"OSCAR_INT2_ROTATION_PATH": "ORTHOGONAL", "SGLANG_OSCAR_K_CLIP": "1"}, "no setting is called"),
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
    groups = plumbing_groups(text_tokens())
    tail_off = {"OSCAR_INT2_ROTATION_PATH": str(orthogonal), "OSCAR_INT2_WINDOW_ON_HIT": "int2"}
    runs = Engines(folder)
    refused = [
        {"engine": {**INT2, **engine}, "env": {n: v.replace("ORTHOGONAL", str(orthogonal)) for n, v in env.items()}}
        for engine, env, _ in REFUSED
    ]
    runs.start("stock", env={"SGLANG_PLUGINS": "none"}, job={"engine": STOCK, "groups": groups})
    runs.start(
        "lossless",
        env=test_mode("lossless", OSCAR_INT2_ROTATION_PATH=str(general)),
        job={"engine": {**INT2, "max_running_requests": None}, "groups": groups},
    )
    runs.start("idle", env={}, job={"engine": STOCK, "groups": groups, "probe": True, "refused": refused})
    runs.start("tail_off", env=test_mode("lossless", **tail_off), job={"engine": INT2, "groups": groups})
    runs.start(
        "mutant",
        env=test_mode("lossless", OSCAR_INT2_TEST_MUTANT="keep_stale_rows", **tail_off),
        job={"engine": INT2, "groups": groups},
    )
    runs.start(
        "poison",
        env={**test_mode("poison", OSCAR_INT2_ROTATION_PATH=str(orthogonal)), "OSCAR_INT2_RECENT_SIZE": "512"},
        job={"engine": {**INT2, "disable_radix_cache": True}, "groups": groups},
    )
    yield runs
    runs.close()


def answers(run: dict[str, Any], what: str = "tokens") -> dict[str, Any]:
    return {name: run["groups"][name][what] for name in GROUPS}


def test_every_hook_has_its_place_in_this_version(engines: Engines) -> None:
    probe = engines.result("idle")["probe"]
    assert probe["missing"] == [] and probe["unpatched"] == []
    assert (probe["dtype"], probe["written"], probe["attribute"]) == ("int2", "3", False)


def test_an_installed_plugin_changes_nothing_while_it_is_not_used(engines: Engines) -> None:
    stock, idle = engines.result("stock"), engines.result("idle")
    assert answers(idle) == answers(stock)
    assert answers(idle, "cached") == answers(stock, "cached")
    assert "plugin=oscar" not in engines.log("stock") and "plugin=oscar" in engines.log("idle")


def test_what_cannot_be_served_does_not_start(engines: Engines) -> None:
    for said, (_, _, text) in zip(engines.result("idle")["refused"], REFUSED, strict=True):
        assert text in said


def test_lossless_tokens_are_those_of_the_stock_backend(engines: Engines) -> None:
    assert answers(engines.result("lossless")) == answers(engines.result("stock"))


def test_a_hit_leaves_the_window_to_prefill(engines: Engines) -> None:
    stock, ours = (answers(engines.result(name), "cached") for name in ("stock", "lossless"))
    prompts = answers(engines.result("stock"), "prompts")
    for name in ("again", "turn2"):
        for length, hit, capped in zip(map(len, prompts[name]), stock[name], ours[name], strict=True):
            assert capped == max(0, min(hit, length - RECENT))
    assert ours["turn2"][0] > 100


def test_rings_alone_stay_right_without_the_tail(engines: Engines) -> None:
    assert answers(engines.result("tail_off")) == answers(engines.result("stock"))
    assert answers(engines.result("tail_off"), "cached") == answers(engines.result("stock"), "cached")


def test_the_comparison_notices_stale_rows(engines: Engines) -> None:
    assert answers(engines.result("mutant")) != answers(engines.result("stock"))


def test_windows_are_really_read(engines: Engines) -> None:
    run = engines.result("poison")
    assert answers(run) == answers(engines.result("stock"))
    (report,) = run["reports"]
    assert report["reads"]["slot"] == 0
    assert min(report["reads"][name] for name in ("extend", "decode", "ring", "sink")) > 0


@pytest.mark.parametrize("name", ["lossless", "tail_off", "poison"])
def test_every_hook_ran_in_the_worker(engines: Engines, name: str) -> None:
    (report,) = engines.result(name)["reports"]
    wanted = {"kv_dtype", "slot_bytes", "budget", "rows", "pool", "alloc"}
    assert {*report["fired"]} == (wanted if name == "tail_off" else wanted | {"tail"})


@pytest.mark.parametrize("name", ["lossless", "poison"])
def test_memory_is_what_was_taken_from_the_budget(engines: Engines, name: str) -> None:
    (report,) = engines.result(name)["reports"]
    facts = report["facts"]
    assert facts["subtracted"] == report["side_store"] + report["transforms"]
    assert report["slot_store"] == (report["tokens"] + 1) * facts["slot_bytes"]
    assert report["kv_size"] == report["slot_store"] + report["side_store"]
    assert report["rows"] == (65 if name == "lossless" else ENGINE["max_running_requests"] + 1)


def test_start_up_tells_artifact_settings_and_memory(engines: Engines) -> None:
    log = engines.log("lossless")
    for part in ("INT2 KV cache: artifact sha256:", "sink 16 (environment)", "k_clip 0.96 (default)", "token slots of"):
        assert part in log
