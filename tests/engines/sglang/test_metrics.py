"""Metrics: what is counted, how it is published, and that the documentation lists all of it."""

import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oscar_zoo.engines.metrics import INFO_LABELS, METRICS, PREFIX, Exporter
from oscar_zoo.engines.sglang.compat import scheduling
from oscar_zoo.engines.sglang.hooks.observation import PrefixHits
from oscar_zoo.engines.sglang.hooks.requests import CANARY, CANARY_METRICS, Band

prometheus = pytest.importorskip("prometheus_client")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
LABELS = {"model_name": "tiny", "tp_rank": 0}
INFO = dict.fromkeys(INFO_LABELS, 1) | {"digest": "sha256:ab"}


def exporter(
    sources: dict[str, Callable[[], float]], labels: dict[str, Any] = LABELS
) -> tuple[Exporter, Any]:
    registry = prometheus.CollectorRegistry()
    made = Exporter(
        labels,
        {**dict.fromkeys(METRICS, lambda: 0), **sources},
        INFO,
        gauge=functools.partial(prometheus.Gauge, registry=registry),
        counter=functools.partial(prometheus.Counter, registry=registry),
    )
    return made, registry


def test_everything_is_there_from_the_start() -> None:
    _, registry = exporter({"capacity_tokens": lambda: 512})
    text = prometheus.generate_latest(registry).decode()
    values = dict(re.findall(r"^(oscar_int2_[a-z_]+)\{.*\} (\S+)$", text, re.MULTILINE))
    assert set(values) - {f"{name.removesuffix('_total')}_created" for name in values} == {
        PREFIX + name for name in METRICS
    }
    assert values["oscar_int2_capacity_tokens"] == "512.0"


def test_an_update_reads_the_sources() -> None:
    now = {"used_tokens": 3, "sink_misses_total": 2}
    made, registry = exporter({name: functools.partial(now.__getitem__, name) for name in now})
    for used, misses, shown in ((7, 5, 5), (1, 5, 5), (2, 4, 5), (2, 6, 7)):
        now.update(used_tokens=used, sink_misses_total=misses)
        made.update()
        assert registry.get_sample_value("oscar_int2_used_tokens", labels()) == used
        # A source that starts again from less never makes a counter fall.
        assert registry.get_sample_value("oscar_int2_sink_misses_total", labels()) == shown


def test_a_label_of_the_user_with_one_of_our_names_is_no_accident() -> None:
    _, registry = exporter({}, {**LABELS, "digest": "mine"})
    shown = {name: str(value) for name, value in INFO.items()}
    assert registry.get_sample_value("oscar_int2_artifact_info", {**labels(), **shown}) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_requests_of_all_versions_are_counted_alike(kept: bool) -> None:
    tokens = {"origin_input_ids": [1] * 90, "output_ids": [2] * 10}
    row = 3 if kept else None
    requests = (  # 0.5.17, 0.5.21, 0.5.23
        SimpleNamespace(**tokens, kv=None, req_pool_idx=row, prefix_indices=[0] * 68),
        SimpleNamespace(**tokens, kv=SimpleNamespace(holds_kv=kept), prefix_indices=[0] * 68),
        SimpleNamespace(**tokens, kv=SimpleNamespace(holds_kv=kept), prefix_len=68),
    )
    assert list(scheduling.new_requests(requests)) == ([] if kept else [(100, 68)] * 3)


def labels() -> dict[str, str]:
    return {name: str(value) for name, value in LABELS.items()}


@pytest.mark.parametrize(
    ("page", "length", "cached", "tail"),
    [
        (1, 100, 0, 0),
        (1, 100, 68, 32),
        (1, 100, 40, 0),
        (16, 100, 64, 36),
        (16, 100, 48, 0),
        (16, 33, 0, 0),
    ],
)
def test_a_hit_that_was_cut_leaves_a_tail(page: int, length: int, cached: int, tail: int) -> None:
    hits = PrefixHits(recent=32, page_size=page)
    hits.see([(length, cached)])
    assert hits.tail_tokens == tail
    off = PrefixHits(recent=0, page_size=page)
    off.see([(length, cached), (length, length)])
    assert off.tail_tokens == 0


WHOLE, LATE = (0.0, 0.1, 0.0, 0.29, 0.31, 0.31, 0.0), (0.0, 0.0, 0.0, math.nan, 0.0)


@pytest.mark.parametrize(
    ("changes", "outside"), [(WHOLE, "----xx-"), (LATE, "---x-"), ((0.0, 9.0, 0.0, 9.0), "-x-x")]
)
def test_the_band_is_that_of_the_first_runs(changes: tuple[float, ...], outside: str) -> None:
    band = Band()
    found = [(band.see([change - 1.0, -change - 2.0]), "-x"[band.outside]) for change in changes]
    assert "".join(now for _, now in found) == outside
    assert [bool(said) for said, _ in found] == [a != b for a, b in pairwise(f"-{outside}")]


def test_the_documentation_lists_every_metric() -> None:
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| ([a-z]+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    kinds = {True: "counter", False: "gauge"}
    assert rows == [
        *((PREFIX + name, kinds[name.endswith("_total")], text) for name, text in METRICS.items()),
        *((CANARY + name, "gauge", text) for name, text in CANARY_METRICS.items()),
    ]
    assert all(f"`{label}`" in PAGE.read_text() for label in INFO_LABELS)


def test_a_server_without_metrics_does_not_import_the_client() -> None:
    code = """
import sys
from types import SimpleNamespace
from oscar_zoo.engines.sglang.hooks import observation
from oscar_zoo.engines.sglang import worker
worker.FIRED.add("pool")
observation.metrics(None, SimpleNamespace(current_scheduler_metrics_enabled=False))
observation.update_metrics(None, SimpleNamespace())
observation.prefix_hits(SimpleNamespace(), None)
assert "metrics" not in worker.FIRED
assert "prometheus_client" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
