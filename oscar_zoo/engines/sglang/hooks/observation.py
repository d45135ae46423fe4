"""Hooks that only report: `/server_info`, metrics on SGLang's own `/metrics`, and the report of a
worker.

SGLang's stats logging updates metrics once per prefill batch and every `--decode-log-interval`
decode steps. Nothing waits for the device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oscar_kernels.spec import MIXED_QUANTIZER, QUANTIZER
from oscar_zoo.engines.metrics import Exporter, Source, recipe_of, sink_sources
from oscar_zoo.engines.sglang import worker
from oscar_zoo.engines.sglang.compat import geometry, scheduling
from oscar_zoo.engines.sglang.worker import FACTS, FIRED
from oscar_zoo.runtime import memory_plan

KEY = "oscar_int2"


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
    capacity, rings = pool.windows.shape.num_rows - 1, pool.windows.rings
    sources: dict[str, Source] = {
        "capacity_tokens": lambda: pool.size,
        "used_tokens": lambda: reporter.stats.kv_used_tokens,
        "evictable_tokens": lambda: reporter.stats.kv_evictable_tokens,
        "capacity_ring_rows": lambda: capacity,
        "used_ring_rows": lambda: int(rows.size) - int(rows.available_size()),
        **sink_sources(pool.windows.sinks),
        "disk_reads_total": lambda: pool.disk_counts.get("read", 0),
        "disk_broken_total": lambda: pool.disk_counts.get("broken", 0),
        "ring_hits_total": lambda: rings.used,
        "ring_misses_total": lambda: rings.lost,
        "rings_not_kept_total": lambda: rings.not_kept,
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
            **recipe_of(chosen),
            "group_size": max(slots.k.group_size, slots.v.group_size),
            "scale_dtype": slots.k.scale_dtype,
            "window_on_hit": chosen.window_on_hit,
        },
        "origins": {name: chosen.origin(name) for name in (*recipe_of(chosen), "group_size")},
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
            **{name: FACTS.get(name, 0) for name in ("host_tokens", "disk_bytes")},
        },
    }
