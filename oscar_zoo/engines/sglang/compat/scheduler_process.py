"""A scheduler process of SGLang: its model runner, its part of `/server_info`, and the outlet of
its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def model_runner(scheduler: Any) -> Any:
    """The model runner of a scheduler process."""
    return scheduler.tp_worker.model_runner


def add_internal_state(output: Any, name: str, value: Any) -> None:
    """Add plain values to the answer of a worker for `/server_info`."""
    output.internal_state[name] = value


@dataclass(frozen=True)
class MetricsOutlet:
    """Where a worker's metrics go.

    Attributes:
        collector: SGLang's own metrics of this worker; ours are updated when it logs its stats.
        runner: the model runner.
        labels: labels of every metric.
        gauge, counter: classes that write where SGLang's `/metrics` reads.
        used_tokens, evictable_tokens: SGLang's last counts of token slots.
    """

    collector: Any
    runner: Any
    labels: dict[str, Any]
    gauge: Callable[..., Any]
    counter: Callable[..., Any]
    used_tokens: Callable[[], float]
    evictable_tokens: Callable[[], float]


def metrics_outlet(reporter: Any) -> MetricsOutlet | None:
    """The outlet of a scheduler process; `None` if SGLang exports nothing, as without
    `--enable-metrics` or on other ranks."""
    if not reporter.current_scheduler_metrics_enabled:
        return None
    # SGLang imports it late too, after it has chosen the folder that all processes write to.
    from prometheus_client import Counter, Gauge

    collector = reporter.metrics_collector
    return MetricsOutlet(
        collector=collector,
        runner=model_runner(reporter.scheduler),
        labels=dict(collector.labels),
        gauge=collector._gauge_cls or Gauge,
        counter=collector._counter_cls or Counter,
        used_tokens=lambda: reporter.stats.kv_used_tokens,
        evictable_tokens=lambda: reporter.stats.kv_evictable_tokens,
    )
