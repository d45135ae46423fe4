"""Hooks that only report: `/server_info`, metrics on SGLang's own `/metrics`, and the report of a
worker.

A metric is a name, a text and a callable that reads plain numbers on the host. SGLang's stats
logging updates all of them once per prefill batch and every `--decode-log-interval` decode steps,
so nothing is counted per token, and nothing waits for the device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from oscar_kernels.spec import MIXED_QUANTIZER, QUANTIZER
from oscar_zoo.engines.setting_flags import one_or_text
from oscar_zoo.engines.sglang import worker
from oscar_zoo.engines.sglang.compat import geometry, scheduling
from oscar_zoo.engines.sglang.worker import FACTS, FIRED
from oscar_zoo.runtime import memory_plan
from oscar_zoo.runtime.kept_rings import KeptRings
from oscar_zoo.runtime.sink_blocks import SinkBlocks

KEY = "oscar_int2"
PREFIX = "oscar_int2_"
Source = Callable[[], float]


METRICS = {
    "capacity_tokens": "Token slots of the INT2 pool.",
    "used_tokens": "Token slots held by running requests.",
    "evictable_tokens": "Token slots kept for prefix hits, given up when a request needs them.",
    "capacity_ring_rows": "Request rows, each with a ring of recent tokens in 16 bits.",
    "used_ring_rows": "Request rows with an owner.",
    "capacity_sink_blocks": "Blocks of first tokens in 16 bits.",
    "used_sink_blocks": "Blocks of first tokens with an owner.",
    "idle_sink_blocks": "Blocks of first tokens kept for prefix hits, without an owner.",
    "sink_hits_total": "Prefix hits that share the block of their first tokens.",
    "sink_host_hits_total": "Prefix hits whose first tokens came back from the host's memory.",
    "sink_misses_total": (
        "Prefix hits given up, or read as INT2, because that block was given away."
    ),
    "ring_hits_total": (
        "Prefix hits that took over the ring of a request that had ended, so that only new tokens"
        " were prefilled."
    ),
    "ring_misses_total": (
        "Prefix hits that read some of their last tokens as INT2, because the ring that they chose"
        " was given away before their first step."
    ),
    "rings_not_kept_total": (
        "Requests that ended without leaving a ring, because more than their tokens decides keys"
        " and values, or because too few of them were in the cache."
    ),
    "tail_tokens_total": (
        "Prompt tokens prefilled although they may have been cached, so that a prefix hit has a"
        " full ring."
    ),
    "bits_per_element": "Bits of a cached element in a token slot, scales and offsets included.",
    "artifact_info": "Always 1; the labels name the artifact and the recipe in force.",
}
"""Every metric without `PREFIX`, in the order of the documentation. One with `_total` counts."""
INFO_LABELS = tuple("name digest format_version sink recent bits k_clip v_clip group_size".split())
"""Labels of `artifact_info` beside those of every metric."""


def server_info(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """Add artifact, recipe and memory to the state of every worker, which `/server_info`
    shows."""
    if "pool" in FIRED:
        result.internal_state[KEY] = _described(scheduling.model_runner(scheduler))


def metrics(_result: None, reporter: Any, *_: Any, **__: Any) -> None:
    collector = scheduling.metrics_collector(reporter) if "pool" in FIRED else None
    if collector is None:
        return
    FIRED.add("metrics")
    runner = scheduling.model_runner(reporter.scheduler)
    pool, rows = geometry.full_pool(runner.token_to_kv_pool), runner.req_to_token_pool
    described = _described(runner)
    rows.oscar_prefix_hits = hits = PrefixHits(worker.kept_by_hits(), pool.page_size)
    capacity = pool.windows.shape.num_rows - 1
    sources: dict[str, Source] = {
        "capacity_tokens": lambda: pool.size,
        "used_tokens": lambda: reporter.stats.kv_used_tokens,
        "evictable_tokens": lambda: reporter.stats.kv_evictable_tokens,
        "capacity_ring_rows": lambda: capacity,
        "used_ring_rows": lambda: int(rows.size) - int(rows.available_size()),
        **window_sources(pool.windows.sinks, pool.windows.rings),
        "tail_tokens_total": lambda: hits.tail_tokens,
        "bits_per_element": lambda: described["bits_per_element"],
    }
    gauge, counter = scheduling.metric_classes(collector)
    info = {**described["artifact"], **described["recipe"]}
    collector.oscar_exporter = Exporter(
        dict(collector.labels), sources, info, gauge=gauge, counter=counter
    )


def update_metrics(_result: None, collector: Any, *_: Any, **__: Any) -> None:
    exporter = getattr(collector, "oscar_exporter", None)  # `metrics` put it there
    if exporter is not None:
        exporter.update()


def prefix_hits(rows: Any, requests: Any, *_: Any, **__: Any) -> None:
    counted = getattr(rows, "oscar_prefix_hits", None)  # `metrics` put it there
    if counted is not None:
        counted.see(scheduling.new_requests(requests))


def oscar_report(scheduler: Any, path: str) -> None:
    """Called through `Engine.collective_rpc`: write what this worker did to
    `<path>.<process id>.json`."""
    if "pool" not in FIRED:
        raise RuntimeError("this server has no INT2 KV cache")
    backend = scheduling.model_runner(scheduler).attn_backend
    backend = getattr(backend, "full_attn_backend", backend)
    report = {"fired": sorted(FIRED), "facts": FACTS, **backend.report()}
    Path(f"{path}.{os.getpid()}.json").write_text(json.dumps(report))


class PrefixHits:
    """The cost of prefix hits of one worker. `recent`: tokens of a ring that a hit leaves to
    prefill; 0 when the ring is not filled again. A hit ends at the boundary of a page."""

    def __init__(self, recent: int, page_size: int) -> None:
        self._recent, self._page_size = recent, page_size
        # Tokens that hits left to prefill. A hit that ends exactly where it was cut may have ended
        # there anyway, so this is an upper bound.
        self.tail_tokens = 0

    def see(self, requests: Iterable[tuple[int, int]]) -> None:
        """Count requests that get a row, by their tokens in all and those that were cached."""
        for length, cached in requests:
            cut = (length - self._recent) // self._page_size * self._page_size
            if cached and self._recent and cached == cut:
                self.tail_tokens += length - cached


def window_sources(sinks: SinkBlocks, rings: KeptRings) -> dict[str, Source]:
    return {
        "capacity_sink_blocks": lambda: sinks.num_blocks - 1 if sinks.width else 0,
        "used_sink_blocks": lambda: sinks.in_use,
        "idle_sink_blocks": lambda: sinks.idle,
        "sink_hits_total": lambda: sinks.hits,
        "sink_host_hits_total": lambda: sinks.host_hits,
        "sink_misses_total": lambda: sinks.forced_misses + sinks.lost,
        "ring_hits_total": lambda: rings.used,
        "ring_misses_total": lambda: rings.lost,
        "rings_not_kept_total": lambda: rings.not_kept,
    }


class Exporter:
    """The metrics of one worker. The classes are those of SGLang's own metrics, which write to the
    files that `/metrics` collects from all processes."""

    def __init__(
        self,
        labels: Mapping[str, Any],
        sources: Mapping[str, Source],
        info: Mapping[str, Any],
        *,
        gauge: Callable[..., Any],
        counter: Callable[..., Any],
    ) -> None:
        self._gauges: list[tuple[Any, Source]] = []
        self._counters: list[tuple[Any, Source]] = []
        self._seen: list[float] = []
        labelled = {name: "" if info[name] is None else info[name] for name in INFO_LABELS}
        sources = {**sources, "artifact_info": lambda: 1}
        for name, text in METRICS.items():
            own = {**labels, **(labelled if name == "artifact_info" else {})}
            told = PREFIX + name, text, [*own]
            if name.endswith("_total"):
                self._counters.append((counter(*told).labels(**own), sources[name]))
                self._seen.append(0.0)
            else:
                made = gauge(*told, multiprocess_mode="mostrecent")
                self._gauges.append((made.labels(**own), sources[name]))
        self.update()

    def update(self) -> None:
        for child, read in self._gauges:
            child.set(read())
        for number, (child, read) in enumerate(self._counters):
            now = read()
            child.inc(max(0.0, now - self._seen[number]))
            self._seen[number] = now


def _described(runner: Any) -> dict[str, Any]:
    chosen, artifact = worker.served()
    pool = geometry.full_pool(runner.token_to_kv_pool)
    slots, tokens = pool.slots.shape, pool.size
    plan = memory_plan.MemoryPlan(**FACTS["plan"])
    none = {"slots": 0, "nbytes": 0, "draft_bytes": 0}
    states, sliding = FACTS.get("states", none), FACTS.get("sliding", none)
    return {
        "artifact": {
            "name": chosen.name,
            "digest": artifact.digest,
            "copy_digest": artifact.copy_digest,
            "id": None if artifact.manifest is None else artifact.manifest.id,
            "format_version": max(artifact.k.format_version, artifact.v.format_version),
            "transform": {"k": artifact.k.transform, "v": artifact.v.transform},
        },
        "recipe": {
            "quantizer": QUANTIZER if chosen.bits.narrow else MIXED_QUANTIZER,
            "bits": str(chosen.bits),
            "sink": chosen.sink,
            "recent": chosen.recent,
            "k_clip": one_or_text(chosen.k_clip),
            "v_clip": one_or_text(chosen.v_clip),
            "group_size": max(slots.k.group_size, slots.v.group_size),
            "scale_dtype": slots.k.scale_dtype,
            "window_on_hit": chosen.window_on_hit,
        },
        "origins": {
            name: chosen.origin(name)
            for name in ("sink", "recent", "bits", "k_clip", "v_clip", "group_size")
        },
        "bits_per_element": memory_plan.bits_per_element(plan.slot, slots),
        "bits_per_element_in_all": memory_plan.bits_per_element(
            plan.slot + plan.fixed / tokens, slots
        ),
        "memory": {
            "token_slots": tokens,
            "slot_bytes": plan.slot,
            "window_bytes": plan.windows,
            "request_rows": FACTS["rows"],
            "transform_bytes": plan.transforms,
            "scratch_bytes": plan.scratch,
            "found_bytes": FACTS["profiled"],
            "state_slots": states["slots"],
            "state_bytes": states["nbytes"],
            "draft_state_bytes": states["draft_bytes"],
            "sliding_slots": sliding["slots"],
            "sliding_bytes": sliding["nbytes"],
        },
    }
