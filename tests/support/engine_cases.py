"""What the token-equality suite runs: the workloads, and the ways to run them that must not change
a token."""

import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES, write_architecture
from cache_oracle import general_set
from engines import Engines, recall_prompts, text_tokens
from tiny_artifacts import TINY, manifest, payload, write_folder
from tiny_models import change_config, save_model

from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.artifact.writer import rotation_bytes

SINK, RECENT = 16, 32
WINDOW = 48
"""Tokens that a layer with a sliding window sees."""
NEW, DONOR = 16, 150
"""Tokens of an answer in `turns` and `one_at_a_time`, and of the prompt that has second turns."""
INT2 = {"kv_cache_dtype": "int2"}
STOCK = {"attention_backend": "torch_native"}
WINDOWS = {"OSCAR_INT2_SINK_SIZE": str(SINK), "OSCAR_INT2_RECENT_SIZE": str(RECENT)}
WINDOWED = ("exaone4", "gemma3_text", "gemma4", "gpt_oss", "mellum")
HYBRID = TINY.model_copy(update={"attention_layers": (1, 3)})
WIDE = HYBRID.model_copy(update={"head_dim": 128, "v_head_dim": 128})
GEOMETRIES: Mapping[str, Geometry] = {
    "Lfm2": HYBRID,
    **dict.fromkeys(WINDOWED, HYBRID),
    "gemma4": WIDE,
}
"""Of the full-attention layers, by family; in other families it is that of the example."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Lfm2": {"hidden_size": 256, "intermediate_size": 512, "head_dim": None}
}
EXACT_STATE = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""States of convolutions are saved as exactly as they are computed. By default they are rounded
wherever one is saved, which is not at the same tokens with a recent window."""
FEWER_STATES = {"mamba_full_memory_ratio": 0.05}
"""Of the memory for the cache. By default SGLang takes nearly half of it, which is gigabytes, and
needs ten seconds to fill them."""
FREE_AT_ONCE = {"SGLANG_SWA_EVICTION_INTERVAL": "1"}
"""SGLang frees slots behind a sliding window with every token, and not 128 at a time."""
NO_TAIL = {"OSCAR_INT2_WINDOW_ON_HIT": "int2"}


@dataclass(frozen=True)
class Case:
    """One Engine."""

    engine: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments
    env: Mapping[str, str] = field(default_factory=dict)  # beside sizes of windows and mode
    # `general` (format 3, one pair per KV head, not orthogonal, centred) or `orthogonal` (format 1)
    rotations: str = "general"
    # Of the slots, `int2` for codes alone; empty for a server without the plugin's cache.
    mode: str = "lossless"
    mutant: str = ""  # a bug of `int2_test_plugin.mutants`
    spawn: bool = False  # workers as users get them
    # Of a small random model in place of the example; see `tiny_models` and `architectures`.
    family: str = ""


def _stock(family: str = "", engine: Mapping[str, Any] = STOCK, **env: str) -> Case:
    return Case(engine, {"SGLANG_PLUGINS": "none", **env}, mode="", family=family)


def _codes(family: str, env: Mapping[str, str], mutant: str = "") -> Case:
    return Case(env=env, rotations="orthogonal", mode="int2", family=family, mutant=mutant)


RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
LARGE_BATCHES = {"max_running_requests": 64, "chunked_prefill_size": 1024}
SMALL_POOL = {"max_total_tokens": 640, "schedule_conservativeness": 0.1}
MIXED_RANKS = {"enable_mixed_chunk": True, "tp_size": 2}
FEW_SLIDING = {**MIXED_RANKS, "swa_full_tokens_ratio": 0.2}
LEAST = {"OSCAR_INT2_SINK_SIZE": "0", "OSCAR_INT2_RECENT_SIZE": "1"}
ALL_SLIDING = {"max_total_tokens": 640, "swa_full_tokens_ratio": 1.0}

FEW_PAGES = {"page_size": 16, "max_total_tokens": 768, "chunked_prefill_size": 1024}
"""Room for four of `visits`, which are prefilled in one piece."""
HOST = {**FEW_PAGES, "enable_hierarchical_cache": True, "hicache_ratio": 16.0}
"""The host has room for all of them."""
MANY_PAGES = {**FEW_PAGES, "max_total_tokens": 6144}
SINKS = {"OSCAR_INT2_IDLE_SINKS": "0", "OSCAR_INT2_HOST_SINKS": "100"}
LATE = {**SINKS, "INT2_TEST_LATE": "1"}
MIXED_BITS = {"OSCAR_INT2_BITS": "4,2x3/2x2,4,2"}

CASES = {
    "stock": _stock(),
    "stock_at_once": _stock(engine={**STOCK, **LARGE_BATCHES}),
    "idle": Case(STOCK, mode=""),
    "fresh_workers": Case(spawn=True),
    "chunk_256": Case({"chunked_prefill_size": 256}),
    "page_16": Case({"page_size": 16}),
    "mixed_chunk": Case({"enable_mixed_chunk": True}),
    "at_once": Case({"chunked_prefill_size": 256, "page_size": 16, **MIXED_RANKS}, RETRACT),
    "two_ranks": Case({"tp_size": 2}),
    "two_copies": Case({"dp_size": 2}),
    "retract": Case(env=RETRACT),
    "small_pool": Case(SMALL_POOL),
    "no_tail": Case(env=NO_TAIL, rotations="orthogonal"),
    "least_windows": Case(env=LEAST),
    "least_windows_no_tail": Case(env={**LEAST, **NO_TAIL}),
    "no_ring_start": Case(env=NO_TAIL, rotations="orthogonal", mutant="no_ring_start"),
    "ring_first": Case(mutant="ring_before_attention"),
    "one_matrix": Case(mutant="partner_is_forward"),
    "experts_stock": _stock("Qwen3Moe"),
    "experts": Case(family="Qwen3Moe"),
    "transformers_stock": _stock("smollm3"),
    "transformers": Case(family="smollm3"),
    "images_stock": _stock("qwen3_vl"),
    "images": Case(family="qwen3_vl"),
    "windows_stock": _stock("gemma3_text"),
    "windows": Case(env=FREE_AT_ONCE, family="gemma3_text"),
    "windows_at_once": Case(FEW_SLIDING, {**FREE_AT_ONCE, **RETRACT}, family="gemma3_text"),
    "windows_one_layer": Case(env=FREE_AT_ONCE, family="gemma3_text", mutant="one_layer"),
    "windows_wrong_slots": Case(
        ALL_SLIDING, FREE_AT_ONCE, family="gemma3_text", mutant="wrong_slots"
    ),
    "windows_int2": _codes("gemma3_text", FREE_AT_ONCE),
    "windows_swapped": _codes("gemma3_text", FREE_AT_ONCE, "swapped_layers"),
    "windows_exaone4": _codes("exaone4", FREE_AT_ONCE),
    "windows_gpt_oss": _codes("gpt_oss", FREE_AT_ONCE),
    "windows_mellum": _codes("mellum", FREE_AT_ONCE),
    "two_sizes_stock": _stock("gemma4", {"enable_multimodal": False}),
    "two_sizes": Case(env=FREE_AT_ONCE, family="gemma4"),
    "two_sizes_at_once": Case(FEW_SLIDING, {**FREE_AT_ONCE, **RETRACT}, family="gemma4"),
    "two_sizes_int2": _codes("gemma4", FREE_AT_ONCE),
    "two_sizes_swapped": _codes("gemma4", FREE_AT_ONCE, "swapped_layers"),
    "hybrid_stock": _stock("Lfm2", {**STOCK, **FEWER_STATES}, **EXACT_STATE),
    "hybrid": Case(env=EXACT_STATE, family="Lfm2"),
    "hybrid_at_once": Case(MIXED_RANKS, {**EXACT_STATE, **RETRACT}, family="Lfm2"),
    "hybrid_few_states": Case({"max_mamba_cache_size": 7}, EXACT_STATE, family="Lfm2"),
    "hybrid_one_layer": Case(env=EXACT_STATE, family="Lfm2", mutant="one_layer"),
    "hybrid_int2": _codes("Lfm2", EXACT_STATE),
    "hybrid_swapped": _codes("Lfm2", EXACT_STATE, "swapped_layers"),
    "visits_stock": _stock(engine={**STOCK, **FEW_PAGES}),
    "host": Case(HOST, LATE),
    "host_at_once": Case({**HOST, **MIXED_RANKS}, {**LATE, **RETRACT}),
    "host_events": Case({**HOST, "hicache_ratio": 2.0, "kv_events_config": ""}, LATE),
    "host_no_sinks": Case(HOST, {**LATE, "OSCAR_INT2_HOST_SINKS": "0"}),
    "host_no_wait": Case(HOST, LATE, mutant="no_wait"),
    "visits_int2": Case(MANY_PAGES, SINKS, "orthogonal", "int2"),
    "host_int2": Case({**HOST, "enable_metrics": True}, LATE, "orthogonal", "int2"),
    "host_first_wait": Case(HOST, LATE, mutant="first_wait"),
    "host_codes_alone": Case(HOST, LATE, "orthogonal", "int2", "codes_alone"),
    "visits_mixed": Case(MANY_PAGES, {**SINKS, **MIXED_BITS}, "orthogonal", "int2"),
    "host_mixed": Case(HOST, {**LATE, **MIXED_BITS}, "orthogonal", "int2"),
}


def start(
    engines: Engines,
    names: Iterable[str],
    groups: list[dict[str, Any]],
    *,
    cases: Mapping[str, Case] = CASES,
) -> None:
    for name in names:
        case = cases[name]
        folders = rotations(engines.folder, GEOMETRIES.get(case.family, TINY))
        env, engine = dict(case.env), dict(case.engine)
        env |= cores(engine, engines.release)
        if case.mode:
            engine |= INT2
            env = {
                **WINDOWS,
                **test_mode(case.mode, case.mutant),
                "OSCAR_INT2_ROTATION_PATH": str(folders[case.rotations]),
                **env,
            }
        if case.family:
            engine["model_path"] = str(model(engines.folder / case.family, case.family))
        job = {
            "engine": engine,
            "groups": groups,
            "memory": not case.spawn and "dp_size" not in engine,
            "probe": name in ("stock", "idle"),
            "heads": name == "idle",
            "image": name == "two_sizes_int2",
        }
        engines.start(name, env=env, job=job, spawn=case.spawn)


def model(folder: Path, family: str) -> Path:
    """A small random model for the same rotations and tokens as the example, written into `folder`
    once."""
    if not folder.exists() and family in ARCHITECTURES:
        write_architecture(family, folder, dtype="float32")
        if family in WINDOWED:
            part = "text_config" if ARCHITECTURES[family].image else None
            change_config(folder, part=part, sliding_window=WINDOW)
    if not folder.exists():
        shape = {"vocab_size": 2048, "num_hidden_layers": 4, "head_dim": 64}
        shape["max_position_embeddings"] = 2048
        # On a CPU, SGLang pads experts to a multiple of 32 channels and leaves the padding as it
        # finds it.
        own = SHAPES.get(family, {"hidden_size": 64, "moe_intermediate_size": 32})
        save_model(folder, family, **{**shape, **own})
    return folder


def rotations(folder: Path, geometry: Geometry = TINY) -> dict[str, Path]:
    """The two kinds of artifacts for a geometry, written into `folder` once."""
    shape = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
    general = (general_set(side, *shape, seed=seed) for seed, side in enumerate("kv"))
    orthogonal, layers = payload(geometry=geometry), geometry.attention_layers
    files = {
        "orthogonal": {**orthogonal, FILE_NAME: manifest(orthogonal, geometry=geometry).to_bytes()},
        "general": {
            f"{side}.pt": rotation_bytes(
                replace(pair, layers=tuple(one for one in pair.layers if one.layer_id in layers))
            )
            for side, pair in zip("kv", general, strict=True)
        },
    }
    about = "-".join(map(str, (*layers, geometry.head_dim)))
    places = {name: folder / f"{name}-{about}" for name in files}
    for name, place in places.items():
        if not place.exists():
            write_folder(place, files[name])
    return places


def cores(engine: Mapping[str, Any], release: str) -> dict[str, str]:
    """On a CPU, SGLang wants to be told the cores of every rank; 0.5.17 counts only tensor
    ranks."""
    copies = engine.get("dp_size", 1) if release != "0.5.17" else 1
    workers = engine.get("tp_size", 1) * copies
    own = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(own[i % len(own)]) for i in range(workers))}


def test_mode(mode: str, mutant: str = "") -> dict[str, str]:
    return {"INT2_TEST_MODE": mode.removeprefix("int2"), "INT2_TEST_MUTANT": mutant}


test_mode.__test__ = False  # type: ignore[attr-defined]


def answers(run: Mapping[str, Any], what: str = "tokens") -> dict[str, Any]:
    return {name: group[what] for name, group in run["groups"].items()}


def logprobs(run: Mapping[str, Any]) -> list[float]:
    """Of every token of every answer; a random model has few tokens to choose from."""
    return [one for group in answers(run, "logprobs").values() for row in group for one in row]


def scheduling_groups(*, queue: int = 10, new: int = 14) -> list[dict[str, Any]]:
    """Shared prefixes, prompts repeated, second turns, shortened prompts, a queue, and lengths
    where windows end.

    At most eight requests run at a time, so the others of the queue wait. Prompts of `lengths` are
    as long as the sinks, the recent window, both together, and one more or less. The first answers
    make the shortest prompt longer than the recent window.

    Args:
        new: tokens of its answers; those to prompts of `lengths` have half as many.
    """
    piece = _pieces(random.Random(0))
    a, c = piece(150), piece(9)
    b = a[:100] + piece(40)
    lengths = (1, SINK - 1, SINK, RECENT, RECENT + 1, SINK + RECENT, SINK + RECENT + 1)
    edges = [piece(number) for number in lengths]
    random_lengths = random.Random(1)
    return [
        {"name": "first", "prompts": [a, b, c], "new": 24},
        {"name": "again", "prompts": [a, b, c], "new": 14},
        {
            "name": "turn2",
            "prompts": [{"of": ["first", 0], "append": piece(5)}, b[:120], [*c, 7]],
            "new": 14,
        },
        {
            "name": "queue",
            "prompts": [piece(random_lengths.randrange(5, 200)) for _ in range(queue)],
            "new": new,
        },
        {"name": "lengths", "prompts": edges, "new": new // 2},
        {"name": "lengths_again", "prompts": [[*edge, 7] for edge in edges], "new": new // 2},
    ]


def turns() -> list[dict[str, Any]]:
    """A request, and two second turns: one shorter than the recent window, and one longer."""
    tokens = text_tokens()
    groups = [{"name": "donor", "prompts": [tokens[9000 : 9000 + DONOR]], "new": NEW}]
    for name, begin, new in (("short", 8000, 5), ("long", 7000, RECENT + 8)):
        turn = {"of": ["donor", 0], "append": tokens[begin : begin + new]}
        groups.append({"name": name, "prompts": [turn], "new": NEW})
    return groups


def visits(number: int, *, new: int, given_up: bool = False) -> list[dict[str, Any]]:
    """So many prompts without a common beginning, four at a time, and then all of them again.

    Args:
        new: tokens of each answer.
        given_up: one of four second answers is aborted.
    """
    piece = _pieces(random.Random(3))
    prompts = [piece(DONOR) for _ in range(number)]
    groups = [
        {"name": f"{visit}{at}", "prompts": prompts[at : at + 4], "new": new}
        for visit in ("first", "second")
        for at in range(0, number, 4)
    ]
    if given_up:
        groups = [{**one, "abort": {"1": 2}} if "second" in one["name"] else one for one in groups]
    return groups


def one_at_a_time() -> list[dict[str, Any]]:
    """Requests that never share a batch, so that every chunk has the full size, and a second turn
    long enough to hit all of the first."""
    prompts = recall_prompts()
    groups = [{"name": f"new{i}", "prompts": [ids], "new": NEW} for i, ids in enumerate(prompts)]
    turn = {"of": ["new0", 0], "append": prompts[1][: 2 * RECENT]}
    return [*groups, {"name": "turn2", "prompts": [turn], "new": NEW}]


def mixed_group(number: int) -> dict[str, Any]:
    """Many short requests over a few shared beginnings; one in eight is aborted after a few
    tokens."""
    order = random.Random(2)
    piece = _pieces(order)
    beginnings = [piece(60) for _ in range(12)]
    prompts, new, abort = [], [], {}
    for index in range(number):
        prompts.append(
            [*order.choice(beginnings)[: order.randrange(8, 60)], *piece(order.randrange(1, 12))]
        )
        new.append(order.randrange(1, 12))
        if order.randrange(8) == 0:
            new[-1], abort[str(index)] = 64, order.randrange(1, 6)
    return {"name": "mixed", "prompts": prompts, "new": new, "abort": abort}


def _pieces(order: random.Random) -> Callable[[int], list[int]]:
    tokens = text_tokens()

    def piece(number: int) -> list[int]:
        begin = order.randrange(len(tokens) - number)
        return tokens[begin : begin + number]

    return piece


def retractions(log: str) -> int:
    """How many requests SGLang says it retracted."""
    return sum(int(part.split(",")[0]) for part in log.split("#retracted_reqs: ")[1:])
