"""Hooks that only report: `/server_info`, metrics, and the report of a worker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from oscar_zoo.engines.sglang import metrics as exported
from oscar_zoo.engines.sglang import server_info as info
from oscar_zoo.engines.sglang import worker
from oscar_zoo.engines.sglang.compat import hybrid_parts, request_rows, scheduler_process
from oscar_zoo.engines.sglang.fired_hooks import FACTS, FIRED


def server_info(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """Add artifact, recipe and memory to the state of every worker, which `/server_info`
    shows."""
    if "pool" in FIRED:
        scheduler_process.add_internal_state(
            result, info.KEY, _described(scheduler_process.model_runner(scheduler))
        )


def metrics(_result: None, reporter: Any, *_: Any, **__: Any) -> None:
    """Add our metrics where SGLang makes its own."""
    outlet = scheduler_process.metrics_outlet(reporter) if "pool" in FIRED else None
    if outlet is None:
        return
    FIRED.add("metrics")
    pool = hybrid_parts.full_pool(outlet.runner.token_to_kv_pool)
    rows = outlet.runner.req_to_token_pool
    described = _described(outlet.runner)
    chosen = worker.served()[0]
    refilled = chosen.window_on_hit.value == "recompute"
    hits = rows.oscar_prefix_hits = exported.PrefixHits(
        chosen.recent.value if refilled else 0, pool.page_size
    )
    capacity = pool.windows.shape.num_rows - 1
    sources: dict[str, exported.Source] = {
        "capacity_tokens": lambda: pool.size,
        "used_tokens": outlet.used_tokens,
        "evictable_tokens": outlet.evictable_tokens,
        "capacity_ring_rows": lambda: capacity,
        "used_ring_rows": lambda: request_rows.rows_in_use(rows),
        **exported.sink_sources(pool.windows.sinks),
        **exported.ring_sources(pool.windows.rings),
        "tail_tokens_total": lambda: hits.tail_tokens,
        "bits_per_element": lambda: described["bits_per_element"],
    }
    labels = {**described["artifact"], **described["recipe"]}
    outlet.collector.oscar_exporter = exported.Exporter(
        outlet.labels, sources, labels, gauge=outlet.gauge, counter=outlet.counter
    )


def update_metrics(_result: None, collector: Any, *_: Any, **__: Any) -> None:
    """Update our metrics when SGLang logs its stats."""
    exporter = getattr(collector, "oscar_exporter", None)  # `metrics` put it there
    if exporter is not None:
        exporter.update()


def prefix_hits(rows: Any, requests: Any, *_: Any, **__: Any) -> None:
    """Count what the new owners of request rows found cached."""
    counted = getattr(rows, "oscar_prefix_hits", None)  # `metrics` put it there
    if counted is not None:
        counted.see(request_rows.new_requests(requests))


def _described(runner: Any) -> dict[str, Any]:
    chosen, artifact = worker.served()
    pool = hybrid_parts.full_pool(runner.token_to_kv_pool)
    return info.describe(chosen, artifact, pool.slots.shape, FACTS, tokens=pool.size)


def oscar_report(scheduler: Any, path: str) -> None:
    """Called through `Engine.collective_rpc`: write what this worker did to
    `<path>.<process id>.json`.
    """
    if "pool" not in FIRED:
        raise RuntimeError("this server has no INT2 KV cache")
    backend = hybrid_parts.full_backend(scheduler_process.model_runner(scheduler).attn_backend)
    report = {"fired": sorted(FIRED), "facts": FACTS, **backend.report()}
    Path(f"{path}.{os.getpid()}.json").write_text(json.dumps(report))
