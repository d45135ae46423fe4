"""Our gauges in vLLM's `/metrics`. The worker is in another process than the server, so the front
asks it before the server answers, by vLLM's own way to call a method of a worker."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

from oscar_zoo.engines.metrics import Exporter, Source, recipe_of, sink_sources
from oscar_zoo.runtime.memory_plan import bits_per_element
from oscar_zoo.runtime.stores import SlotShape

PATHS = ("/metrics", "/metrics/")
LONGEST = 5.0
"""Seconds that the worker may take, which answers between two steps."""
SHORTEST = 1.0
"""Seconds between two questions, since everybody may ask for metrics."""


def capacity(cache: Any) -> int:
    """Tokens, by a `CacheConfig`. Several groups of layers share the pages, so vLLM counts whole
    requests there."""
    if cache.kv_cache_dtype_skip_layers or cache.mamba_block_size:
        return int(cache.kv_cache_size_tokens)
    return int(cache.block_size * (cache.num_gpu_blocks - 1))


class Extension:
    """What `--worker-extension-cls` adds to vLLM's worker."""

    def oscar_told(self: Any) -> dict[str, Any]:
        """Labels of the artifact as `info`, and numbers by the names of `METRICS`."""
        from oscar_zoo.engines.vllm import worker

        chosen, artifact = worker.served()
        assert worker.running is not None, "weights have been loaded"
        windows = worker.running.windows
        shape = windows.shape
        specs = tuple(worker.specs_of(shape.k_head_dim, i) for i in range(shape.num_layers))
        slots = SlotShape(specs, 1, shape.num_kv_heads)
        return {
            "info": {
                "name": chosen.name,
                "digest": chosen.copy_of or artifact.digest,
                "format_version": max(artifact.k.format_version, artifact.v.format_version),
                "group_size": slots.k.group_size,
                **recipe_of(chosen),
            },
            "capacity_ring_rows": shape.num_rows - 1,
            "used_ring_rows": len(self.model_runner.req_states.req_id_to_index),
            "bits_per_element": bits_per_element(slots.token_bytes(), slots),
            **{name: read() for name, read in sink_sources(windows.sinks).items()},
        }


class Metrics:
    """Those of one server; `state` is that of its application."""

    def __init__(self, state: Any) -> None:
        self._state, self._told, self._asked = state, dict[str, Any](), -SHORTEST
        self._exporter: Exporter | None = None

    async def refresh(self) -> None:
        """Ask the worker, unless it was asked just now; does nothing where it does not answer."""
        if time.monotonic() < self._asked + SHORTEST:
            return
        self._asked = time.monotonic()
        try:
            asked = self._state.engine_client.collective_rpc("oscar_told")
            told, *_ = await asyncio.wait_for(asked, LONGEST)  # ranks say the same
        except Exception:  # whatever ends an engine: its own metrics are still answered
            return
        self._told |= told
        self._exporter = self._exporter or self._made(told["info"])
        self._exporter.update()

    def _made(self, info: dict[str, Any]) -> Exporter:
        from prometheus_client import Counter, Gauge

        config = self._state.vllm_config
        self._told["capacity_tokens"] = capacity(config.cache_config)
        labels = {"model_name": config.model_config.served_model_name, "engine": "0"}
        read, names = self._told.__getitem__, self._told.keys() - {"info"}
        sources: dict[str, Source] = {one: functools.partial(read, one) for one in names}
        return Exporter(labels, sources, info, gauge=Gauge, counter=Counter)
