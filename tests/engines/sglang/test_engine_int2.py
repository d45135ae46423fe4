"""INT2 inside stock SGLang on the CPU: tokens, metrics and what a server says of itself.

A cache of this process is the reference. Other chunk sizes and another clip must give other tokens,
so the comparison can fail.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from engines import CHUNK, ENGINE, MODEL, Engines, needs_sglang, recall_prompts, report_of
from reference_server import ReferenceServer, Served, equal_tokens
from tiny_artifacts import artifact_files, manifest, payload, write_folder

from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import SideWidths, Widths, Windows
from oscar_zoo.engines.metrics import INFO_LABELS, METRICS, PREFIX
from oscar_zoo.evaluate.generate import greedy_generate
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import load_model
from oscar_zoo.runtime.kept_rings import LATE

# An Engine starts in 10 to 20 seconds on two idle cores, and in minutes on busy ones.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

SINK, RECENT = 16, 32
INT2 = {"kv_cache_dtype": "int2"}
MIXED = Widths(
    k=SideWidths(bits=(4, 2, 4, 2), clip=(0.0, 0.96, 0.98, 0.94)),
    v=SideWidths(bits=(2, 4, 2, 2), clip=(0.92, 0.0, 0.92, 0.9)),
)
NEW = 24
SHORT = 6
"""Tokens of a turn that does not fill its window by itself."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("engines")
    env = {
        "OSCAR_INT2_SINK_SIZE": str(SINK),
        "OSCAR_INT2_RECENT_SIZE": str(RECENT),
        "OSCAR_INT2_ROTATION_PATH": str(write_folder(folder / "artifact", artifact_files())),
    }
    groups, runs = one_at_a_time(), Engines(folder)
    plain = {"engine": INT2, "groups": groups}
    runs.start("int2", env=env, job={**plain, "engine": {**INT2, "enable_metrics": True}})
    runs.start("clip", env={**env, "INT2_TEST_MUTANT": "clip_one_rank_lower"}, job=plain)
    mixed = write_folder(folder / "mixed", artifact_files(widths=MIXED))
    runs.start(
        "mixed",
        env={**env, "OSCAR_INT2_ROTATION_PATH": str(mixed)},
        job={**plain, "groups": groups[: 2 * len(recall_prompts())]},
    )
    yield runs
    runs.close()


def one_at_a_time() -> list[dict[str, Any]]:
    """Requests that never share a batch, so that every chunk has the full size: recall prompts,
    hits, second turns."""
    prompts = recall_prompts()
    groups = [{"name": f"new{i}", "prompts": [ids], "new": NEW} for i, ids in enumerate(prompts)]
    groups += [{"name": f"hit{i}", "prompts": [ids], "new": NEW} for i, ids in enumerate(prompts)]
    turn = {"of": ["new0", 0], "append": prompts[1][40:90]}
    short = {"of": ["turn2", 0], "append": prompts[2][40 : 40 + SHORT]}
    groups.append({"name": "turn2", "prompts": [turn], "new": NEW})
    return [*groups, {"name": "turn3", "prompts": [short], "new": NEW}]


def test_metrics_count_what_requests_did(engines: Engines) -> None:
    """One request after the other, and their prefix hits are known, so every number is."""
    run = engines.result("int2")
    found = {sample["name"]: sample for sample in run["metrics"]}
    value = {name: sample["value"] for name, sample in found.items()}
    requests = [(len(g["prompts"][0]), g["cached"][0]) for g in run["groups"].values()]
    hits = [(length, cached) for length, cached in requests if cached]
    assert len(hits) == 5
    # A later turn hits all of the one before, so the cut is not what ended it.
    tails = sum(length - cached for length, cached in hits if length - cached == RECENT)
    rows = ENGINE["max_running_requests"]
    assert {name: value[PREFIX + name] for name in METRICS} == {
        "capacity_tokens": ENGINE["max_total_tokens"],
        "used_tokens": 0,
        "evictable_tokens": value["sglang:kv_evictable_tokens"],
        "capacity_ring_rows": rows,
        "used_ring_rows": 0,
        "capacity_sink_blocks": 2 * rows,
        "used_sink_blocks": 0,
        "idle_sink_blocks": 3,
        "disk_reads_total": 0,
        "disk_broken_total": 0,
        "sink_hits_total": len(hits),
        "sink_host_hits_total": 0,
        "sink_misses_total": 0,
        "ring_hits_total": 1,
        "ring_misses_total": 0,
        "rings_not_kept_total": 0,
        "tail_tokens_total": tails,
        "bits_per_element": 2 + 32 / 64,
        "artifact_info": 1,
    }
    assert tails == 3 * RECENT and value["sglang:kv_evictable_tokens"] > 1000
    labels = found["sglang:kv_used_tokens"]["labels"]
    for name in METRICS:
        own = INFO_LABELS if name == "artifact_info" else ()
        assert found[PREFIX + name]["labels"].keys() == {*labels, *own}
    shown = found["oscar_int2_artifact_info"]["labels"]
    assert shown["digest"] == manifest(payload()).digest
    names = ("sink", "recent", "k_clip", "group_size")
    assert [shown[name] for name in names] == ["16", "32", "0.96", "64"]


def test_the_server_says_what_it_serves(engines: Engines) -> None:
    run = engines.result("int2")
    (info,), (report,) = run["info"], run["reports"]
    given = manifest(payload())
    assert info["artifact"] == {
        "name": None,
        "digest": given.digest,
        "id": given.id,
        "format_version": 1,
        "transform": {"k": "oscar", "v": "oscar"},
        "copy_digest": None,
    }
    clip = given.recipe.clip
    recipe = {"sink": SINK, "recent": RECENT, "k_clip": clip.k, "v_clip": clip.v}
    assert (recipe | {"window_on_hit": "recompute"}).items() <= info["recipe"].items()
    assert info["origins"] == {"sink": "environment", "recent": "environment"} | dict.fromkeys(
        ("bits", "k_clip", "v_clip", "group_size"), "recipe"
    )
    assert info["bits_per_element"] == 2.5
    memory = info["memory"]
    same = {"token_slots": "tokens", "window_bytes": "window_store", "request_rows": "rows"}
    for ours, theirs in (same | {"transform_bytes": "transforms"}).items():
        assert memory[ours] == report[theirs]
    fixed = report["window_store"] + report["transforms"] + report["scratch"]
    spent = memory["slot_bytes"] * memory["token_slots"] + fixed
    elements = 4 * 2 * (64 + 64) * memory["token_slots"]
    assert info["bits_per_element_in_all"] == pytest.approx(8 * spent / elements)


@pytest.fixture(scope="module")
def reference() -> ReferenceServer:
    model = load_model(str(MODEL), dtype="float32")
    recipe = manifest(payload()).recipe.model_copy(
        update={"windows": Windows(sink=SINK, recent=RECENT)}
    )
    k, v = (read_rotation(data, what=name) for name, data in payload().items())
    return ReferenceServer(model, CacheSpec(k, v, recipe), CHUNK)


def test_every_run_had_its_mode(engines: Engines) -> None:
    for name, mutant in (("int2", ""), ("clip", "clip_one_rank_lower")):
        report = report_of(engines.result(name))
        assert (report["mode"], report["mutant"]) == ("", mutant)


def test_a_hit_keeps_its_first_tokens(engines: Engines) -> None:
    report = report_of(engines.result("int2"))
    assert report["reads"]["slot"] > report["reads"]["slot_sink"] == 0
    assert report["sinks"]["hits"] > 0 == report["sinks"]["lost"]


def test_int2_tokens_are_the_reference_s(engines: Engines, reference: ReferenceServer) -> None:
    """Chunked prefill over INT2 history; then the same prompts again and a second turn, whose
    prefix is a cache hit."""
    groups = engines.result("int2")["groups"]
    donors = [reference.generate(ids, NEW) for ids in recall_prompts()]
    equal = 0
    for i, donor in enumerate(donors):
        assert donor.prompt > SINK + RECENT + 100 and groups[f"new{i}"]["cached"] == [0]
        equal += equal_tokens(groups[f"new{i}"]["tokens"][0], donor)
        cached = donor.prompt - RECENT
        assert groups[f"hit{i}"]["cached"] == [cached]
        equal += equal_tokens(
            groups[f"hit{i}"]["tokens"][0],
            reference.generate(donor.ids[: donor.prompt], NEW, donor, cached),
        )
    (turn,), (cached,) = groups["turn2"]["prompts"], groups["turn2"]["cached"]
    if groups["new0"]["tokens"] == [donors[0].answer]:
        assert len(turn) - 50 - cached in (0, 1)
        equal += equal_tokens(
            groups["turn2"]["tokens"][0], reference.generate(turn, NEW, donors[0], cached)
        )
        second = reference.generate(turn, NEW, donors[0], cached)
        equal += third_turn(groups, reference, second)
    assert equal > 0.7 * NEW * len(groups)


def third_turn(groups: dict[str, Any], reference: ReferenceServer, second: Served) -> int:
    """Equal tokens of a short turn: it prefills no window, because the ring of the turn before is
    still there."""
    (turn,), (cached,) = groups["turn3"]["prompts"], groups["turn3"]["cached"]
    if groups["turn2"]["tokens"] != [second.answer]:
        return 0
    assert len(turn) - SHORT == len(second.ids) and cached == len(second.ids) - 1
    first = cached - RECENT + LATE
    with pytest.raises(AssertionError, match="which leads by"):
        equal_tokens(groups["turn3"]["tokens"][0], reference.generate(turn, NEW, second, cached))
    third = reference.generate(turn, NEW, second, cached, ring_from=first)
    return equal_tokens(groups["turn3"]["tokens"][0], third)


def test_widths_of_layers_are_the_recipe_s(engines: Engines, reference: ReferenceServer) -> None:
    """Chunked prefill and hits over codes of 2 and 4 bits, token by token."""
    run = engines.result("mixed")
    (info,), (report,) = run["info"], run["reports"]
    recipe = reference.spec.recipe.with_widths(MIXED)
    mixed = ReferenceServer(reference.model, replace(reference.spec, recipe=recipe), CHUNK)
    told = info["recipe"]
    assert (told["bits"], told["quantizer"]) == ("4,2,4,2/2,4,2x2", recipe.quantizer)
    assert (told["k_clip"], told["v_clip"]) == ("0,0.96,0.98,0.94", "0.92,0,0.92,0.9")
    assert info["origins"]["bits"] == "recipe"
    assert info["bits_per_element"] == recipe.bits_per_element == 2.5 + 2 * 3 / 8
    assert report["facts"]["slot_bytes"] == 2 * (5 * 20 + 3 * 36)
    assert report["slot_store"] == (report["tokens"] + 1) * report["facts"]["slot_bytes"]
    equal = 0
    for i, ids in enumerate(recall_prompts()):
        donor, groups = mixed.generate(ids, NEW), run["groups"]
        equal += equal_tokens(groups[f"new{i}"]["tokens"][0], donor)
        cached = donor.prompt - RECENT
        again = mixed.generate(donor.ids[: donor.prompt], NEW, donor, cached)
        equal += equal_tokens(groups[f"hit{i}"]["tokens"][0], again)
    assert equal > 0.7 * NEW * len(run["groups"])
    with pytest.raises(AssertionError, match="which leads by"):
        for ids, tokens in zip(recall_prompts(), first(engines, "mixed"), strict=True):
            equal_tokens(tokens, reference.generate(ids, NEW))


def test_a_short_turn_takes_the_ring_of_the_last_one(engines: Engines) -> None:
    assert report_of(engines.result("int2"))["rings"] == {"used": 1, "lost": 0}


def test_the_reference_is_the_librarys(reference: ReferenceServer) -> None:
    """The reference adds prefix hits to `evaluate.generate`; without a hit the two must agree."""
    ids = recall_prompts()[0]
    tokens = greedy_generate(
        reference.model, ids, cache=reference.spec, max_new_tokens=NEW, chunk_size=CHUNK
    )
    equal_tokens(tokens, reference.generate(ids, NEW))


def test_other_chunk_sizes_give_other_tokens(engines: Engines, reference: ReferenceServer) -> None:
    """So the comparison above does depend on which tokens are read as INT2."""
    other, groups = ReferenceServer(reference.model, reference.spec, 300), first(engines, "int2")
    assert [other.generate(ids, NEW).answer for ids in recall_prompts()] != groups


def first(engines: Engines, name: str) -> list[list[int]]:
    """Answers to the prompts that come first."""
    groups = engines.result(name)["groups"]
    return [groups[f"new{i}"]["tokens"][0] for i in range(len(recall_prompts()))]


def test_the_reference_notices_a_lower_clip(engines: Engines, reference: ReferenceServer) -> None:
    with pytest.raises(AssertionError, match="which leads by"):
        for ids, tokens in zip(recall_prompts(), first(engines, "clip"), strict=True):
            equal_tokens(tokens, reference.generate(ids, NEW))


def test_int2_reads_every_tier(engines: Engines) -> None:
    report = report_of(engines.result("int2"))
    assert min(number for tier, number in report["reads"].items() if tier != "slot_sink") > 0
    assert report["facts"]["slot_bytes"] == 4 * 2 * 2 * (16 + 4)
