"""The comparison as one PNG: time per token, time to first token, and capacity, BF16 beside
INT2."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from oscar_zoo.bench.report import LABELS, Report
from oscar_zoo.bench.sides import CACHES, Cache

DPI = 150
INK = "#1c2128"
"""Of all text."""
_COLOURS: dict[Cache, str] = {"bf16": "#0b6aa8", "int2": "#b34a06"}
"""Blue and orange of Okabe and Ito, darkened until they are legible on white."""
_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.alpha": 0.4,
    "text.color": INK,
    "text.parse_math": False,
}
_WIDTH = 0.38
"""Of a bar; a pair takes less than 1."""


def render_png(report: Report) -> bytes:
    """Three charts in a row; a case without a figure has a gap."""
    cases = [f"{case.batch} × {case.context:,}" for case in report.cases]
    with _drawing():
        figure = Figure(figsize=(5 + 1.5 * len(cases), 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        per_token, first, room = figure.subplots(1, 3, width_ratios=[len(cases), len(cases), 1.6])
        _bars(per_token, "ms per token", cases, _values(report, "ms_per_token"))
        _bars(first, "time to first token, s", cases, _values(report, "ttft_s"))
        capacity = {c: [(side.capacity or 0) / 1e3] for c, side in report.sides.items()}
        _bars(room, "cache, k tokens", [""], capacity)
        figure.legend(
            *per_token.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False
        )
        weights = "random weights" if report.random_weights else "its own weights"
        figure.suptitle(
            f"{report.model}, {weights}, {report.device}: batch × context",
            color=INK,
            fontsize=10,
        )
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": "oscar-zoo"})
    return stream.getvalue()


@contextmanager
def _drawing() -> Iterator[None]:
    """Within the block matplotlib has our settings, whatever its configuration file says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        # The name of a model may be written in any script.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _values(report: Report, name: str) -> dict[Cache, list[float]]:
    found: dict[Cache, list[float]] = {}
    for cache, side in report.sides.items():
        results = [side.of(case) for case in report.cases]
        found[cache] = [
            getattr(r.figures, name) or 0.0 if r and r.figures else 0.0 for r in results
        ]
    return found


def _bars(axes: Axes, title: str, names: Sequence[str], values: dict[Cache, list[float]]) -> None:
    for index, cache in enumerate(cache for cache in CACHES if cache in values):
        places = [place + (index - 0.5) * _WIDTH for place in range(len(names))]
        bars: Any = axes.bar(
            places, values[cache], _WIDTH, color=_COLOURS[cache], label=LABELS[cache]
        )
        texts = [
            f"{value:,.3g}" if 0 < value < 999.5 else f"{value:,.0f}" if value else ""
            for value in values[cache]
        ]
        axes.bar_label(bars, texts, fontsize=7, color=INK)
    axes.set_title(title)
    axes.set_xticks(range(len(names)), names)
    axes.grid(visible=False, axis="x")
