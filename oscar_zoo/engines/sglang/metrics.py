"""Prometheus metrics of the INT2 cache, on SGLang's own `/metrics`. Needs neither torch nor sglang.

A metric is a name, a kind and a callable that reads plain numbers on the host. SGLang's stats
logging calls `update` once per prefill batch and every `--decode-log-interval` decode steps. So
nothing is counted per token, and nothing waits for the device. prometheus_client is not imported
here: the caller passes the classes of SGLang's own metrics, which write to the files that
`/metrics` collects from all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oscar_zoo.runtime.kept_rings import KeptRings
from oscar_zoo.runtime.sink_blocks import SinkBlocks

PREFIX = "oscar_int2_"

Source = Callable[[], float]


@dataclass(frozen=True)
class Metric:
    """One metric: its name without `PREFIX`, its kind, and its help text."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str

    @property
    def full_name(self) -> str:
        """The name on `/metrics`."""
        return PREFIX + self.name


METRICS = (
    Metric("capacity_tokens", "gauge", "Token slots of the INT2 pool."),
    Metric("used_tokens", "gauge", "Token slots held by running requests."),
    Metric(
        "evictable_tokens",
        "gauge",
        "Token slots kept for prefix hits, given up when a request needs them.",
    ),
    Metric(
        "capacity_ring_rows", "gauge", "Request rows, each with a ring of recent tokens in 16 bits."
    ),
    Metric("used_ring_rows", "gauge", "Request rows with an owner."),
    Metric("capacity_sink_blocks", "gauge", "Blocks of first tokens in 16 bits."),
    Metric("used_sink_blocks", "gauge", "Blocks of first tokens with an owner."),
    Metric(
        "idle_sink_blocks",
        "gauge",
        "Blocks of first tokens kept for prefix hits, without an owner.",
    ),
    Metric("sink_hits_total", "counter", "Prefix hits that share the block of their first tokens."),
    Metric(
        "sink_misses_total",
        "counter",
        "Prefix hits given up, or read as INT2, because that block was given away.",
    ),
    Metric(
        "ring_hits_total",
        "counter",
        "Prefix hits that took over the ring of a request that had ended, so that only new tokens"
        " were prefilled.",
    ),
    Metric(
        "ring_misses_total",
        "counter",
        "Prefix hits that read some of their last tokens as INT2, because the ring that they chose"
        " was given away before their first step.",
    ),
    Metric(
        "rings_not_kept_total",
        "counter",
        "Requests that ended without leaving a ring, because more than their tokens decides keys"
        " and values, or because too few of them were in the cache.",
    ),
    Metric(
        "tail_tokens_total",
        "counter",
        "Prompt tokens prefilled although they may have been cached, so that a prefix hit has a"
        " full ring.",
    ),
    Metric(
        "bits_per_element",
        "gauge",
        "Bits of a cached element in a token slot, scales and offsets included.",
    ),
    Metric(
        "artifact_info", "gauge", "Always 1; the labels name the artifact and the recipe in force."
    ),
)
"""Every metric, in the order of the documentation."""
INFO_LABELS = (
    "name",
    "digest",
    "format_version",
    "sink",
    "recent",
    "bits",
    "k_clip",
    "v_clip",
    "group_size",
)
"""Labels of `artifact_info` beside those of every metric."""


@dataclass
class PrefixHits:
    """The cost of prefix hits of one worker.

    Attributes:
        recent: tokens of a ring that a hit leaves to prefill; 0 when the ring is not filled again.
        page_size: a hit ends at a page boundary.
        tail_tokens: tokens that hits left to prefill. A hit that ends exactly where it was cut may
            have ended there anyway, so this is an upper bound.
    """

    recent: int
    page_size: int
    tail_tokens: int = 0

    def see(self, requests: Iterable[tuple[int, int]]) -> None:
        """Count requests that get a row.

        Args:
            requests: for each, its tokens in all and how many of them were cached.
        """
        for length, cached in requests:
            if (
                cached
                and self.recent
                and cached == (length - self.recent) // self.page_size * self.page_size
            ):
                self.tail_tokens += length - cached


def sink_sources(sinks: SinkBlocks) -> dict[str, Source]:
    """The sources of the sink metrics. A hit counts as missed if its block was given away or if it
    was served without a block."""
    return {
        "capacity_sink_blocks": lambda: sinks.num_blocks - 1 if sinks.width else 0,
        "used_sink_blocks": lambda: sinks.in_use,
        "idle_sink_blocks": lambda: sinks.idle,
        "sink_hits_total": lambda: sinks.hits,
        "sink_misses_total": lambda: sinks.forced_misses + sinks.lost,
    }


def ring_sources(rings: KeptRings) -> dict[str, Source]:
    """The sources of the metrics of kept rings."""
    return {
        "ring_hits_total": lambda: rings.used,
        "ring_misses_total": lambda: rings.lost,
        "rings_not_kept_total": lambda: rings.not_kept,
    }


class Exporter:
    """The metrics of one worker."""

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
        for metric in METRICS:
            own = labelled if metric.name == "artifact_info" else {}
            names = [*labels, *(name for name in own if name not in labels)]
            if metric.kind == "counter":
                made = counter(metric.full_name, metric.help, names)
                self._counters.append((made.labels(**labels), sources[metric.name]))
                self._seen.append(0.0)
                continue
            made = gauge(metric.full_name, metric.help, names, multiprocess_mode="mostrecent")
            child = made.labels(**{**labels, **own})
            if own:
                child.set(1)
            else:
                self._gauges.append((child, sources[metric.name]))
        self.update()

    def update(self) -> None:
        """Publish the current values of the sources."""
        for child, read in self._gauges:
            child.set(read())
        for number, (child, read) in enumerate(self._counters):
            now = read()
            child.inc(max(0.0, now - self._seen[number]))
            self._seen[number] = now
