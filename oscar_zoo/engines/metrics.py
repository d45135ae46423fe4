"""The gauges and counters of an INT2 cache, the same with every engine.

A metric is a name, a text and a callable that reads a plain number on the host. Who makes an
`Exporter` says when it is updated, so nothing is counted per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oscar_zoo.engines.setting_flags import one_or_text
from oscar_zoo.engines.settings import RecipeValues
from oscar_zoo.runtime.sink_blocks import SinkBlocks

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
    "disk_reads_total": "Files with a page or with first tokens that were read from --disk-cache.",
    "disk_broken_total": "Such files that were damaged, cut short or foreign, and were removed.",
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


def sink_sources(sinks: SinkBlocks) -> dict[str, Source]:
    """Of the blocks of first tokens."""
    return {
        "capacity_sink_blocks": lambda: sinks.num_blocks - 1 if sinks.width else 0,
        "used_sink_blocks": lambda: sinks.in_use,
        "idle_sink_blocks": lambda: sinks.idle,
        "sink_hits_total": lambda: sinks.hits,
        "sink_host_hits_total": lambda: sinks.host_hits,
        "sink_misses_total": lambda: sinks.forced_misses + sinks.lost,
    }


def recipe_of(chosen: RecipeValues) -> dict[str, Any]:
    """Windows, bits and clip ratios in force, as JSON values."""
    return {
        "sink": chosen.sink,
        "recent": chosen.recent,
        "bits": str(chosen.bits),
        "k_clip": one_or_text(chosen.k_clip),
        "v_clip": one_or_text(chosen.v_clip),
    }


class Exporter:
    """Those metrics of one worker that have a source. The classes are those of the engine's own
    metrics, so that its `/metrics` has them."""

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
        for name in filter(sources.__contains__, METRICS):
            own = {**labels, **(labelled if name == "artifact_info" else {})}
            told = PREFIX + name, METRICS[name], [*own]
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
