"""The comparison as one PNG: time per token, time to first token, and capacity, cache beside cache.

A cache that was measured with several attention backends has a bar of the best in each chart. Lines
on the bars reach from the smallest to the largest repeat.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from oscar_zoo.bench.report import Report
from oscar_zoo.bench.sides import CACHES, LABELS, Cache, Side
from oscar_zoo.engines.sglang.offline_job import Case

DPI = 150
INK = "#1c2128"
"""Of all text."""
_COLOURS: dict[Cache, str] = {"bf16": "#0b6aa8", "fp8": "#00795a", "int2": "#b34a06"}
"""Blue, green and orange of Okabe and Ito, darkened until they are legible on white."""
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
_GROUP = 0.78
"""Width of all bars of one case."""
_Bar = tuple[float, float, float]
"""A figure, and the smallest and the largest of its repeats; zeros where there is none."""
_NO_BAR: _Bar = (0.0, 0.0, 0.0)


def render_png(report: Report) -> bytes:
    """Three charts in a row; a case without a figure has a gap."""
    caches = [cache for cache in CACHES if any(side.cache == cache for side in report.sides)]
    cases = [f"{case.batch} × {case.context:,}" for case in report.cases]
    gains = [_ratios(report, partial(report.speedup, case)) for case in report.cases]
    compared = [f"{case}\n{gain}" for case, gain in zip(cases, gains, strict=True)]
    with _drawing():
        width = 5 + (0.6 + 0.45 * len(caches)) * len(cases)
        figure = Figure(figsize=(width, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        per_token, first, room = figure.subplots(1, 3, width_ratios=[len(cases), len(cases), 1.6])
        steps = {cache: _values(report, cache, "ms_per_token") for cache in caches}
        _bars(per_token, "ms per token", compared, steps)
        firsts = {cache: _values(report, cache, "ttft_s") for cache in caches}
        _bars(first, "time to first token, s", cases, firsts)
        ratios = _ratios(report, report.capacity_ratio)
        _bars(room, "cache, k tokens", [ratios], {c: [_capacity(report, c)] for c in caches})
        figure.legend(
            *per_token.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False
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


def _ratios(report: Report, of: Callable[[Cache], float | None]) -> str:
    """A line for each stock cache that INT2 is compared with."""
    found = [(LABELS[cache], ratio) for cache in report.compared if (ratio := of(cache))]
    return "\n".join(f"{ratio:.2f}x vs {label}" for label, ratio in found)


def _values(report: Report, cache: Cache, name: str) -> list[_Bar]:
    """The figure of each case with the side that has the smallest."""
    sides = [side for side in report.sides if side.cache == cache]
    return [
        min((bar for side in sides if (bar := _bar(report, side, case, name))), default=_NO_BAR)
        for case in report.cases
    ]


def _bar(report: Report, side: Side, case: Case, name: str) -> _Bar | None:
    result, value = report.result(side, case), report.number(side, case, name)
    return None if result is None or value is None else (value, *result.spread[name])


def _capacity(report: Report, cache: Cache) -> _Bar:
    found = [result.capacity or 0 for side, result in report.sides.items() if side.cache == cache]
    return (max(found) / 1e3,) * 3


def _bars(axes: Axes, title: str, names: Sequence[str], bars: dict[Cache, list[_Bar]]) -> None:
    width = _GROUP / len(bars)
    for index, (cache, found) in enumerate(bars.items()):
        values = [value for value, _, _ in found]
        places = [place + (index - (len(bars) - 1) / 2) * width for place in range(len(names))]
        errors = [[v - low for v, low, _ in found], [high - v for v, _, high in found]]
        drawn: Any = axes.bar(
            places,
            values,
            width,
            color=_COLOURS[cache],
            label=LABELS[cache],
            yerr=errors,
            error_kw={"ecolor": INK, "elinewidth": 0.8},
        )
        texts = [
            f"{value:,.3g}" if 0 < value < 999.5 else f"{value:,.0f}" if value else ""
            for value in values
        ]
        axes.bar_label(drawn, texts, fontsize=7, color=INK)
    axes.set_title(title)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.grid(visible=False, axis="x")
