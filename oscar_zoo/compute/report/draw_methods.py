"""Charts that compare methods: perplexity against BF16, and output error by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from oscar_zoo.compute.report import wording
from oscar_zoo.compute.report.axes import FEW_LAYERS, End, label_ends, layer_axis, positive, value_axis, weight
from oscar_zoo.compute.report.data import Candidate, ReportData
from oscar_zoo.compute.report.style import INK, method_colours, method_markers

_LINEAR_PERCENT = 15
"""Changes below this fit one linear axis."""


def draw_perplexity(figure: FigureBase, data: ReportData) -> None:
    """One dot per candidate with its standard error, and BF16 as a line; plain perplexity without BF16."""
    assert data.comparison is not None
    named = zip(data.comparison.candidates, wording.candidate_names(data.comparison.candidates), strict=True)
    measured = [(row, name) for row, name in named if row.perplexity is not None]
    relative = all(row.change_percent is not None for row, _ in measured)
    colours, markers = method_colours(data.methods), method_markers(data.methods)
    axes = figure.subplots()
    for y, (row, _) in enumerate(measured):
        value = (row.change_percent if relative else row.perplexity) or 0.0
        error = (row.standard_error or 0.0) if relative else 0.0
        look: dict[str, Any] = {"color": colours[row.method].light, "markersize": 7}
        axes.errorbar(value, y, xerr=error or None, fmt=markers[row.method], elinewidth=1.6, capsize=3, **look)
        text = wording.change(value) if relative else wording.perplexity(value)
        axes.annotate(
            text, (value + error, y), (8, 0), textcoords="offset points", va="center", weight=weight(row.chosen)
        )
    axes.set_yticks(range(len(measured)), [name for _, name in measured])
    for label, (row, _) in zip(axes.get_yticklabels(), measured, strict=True):
        label.set(color=colours[row.method].light, weight=weight(row.chosen))
    axes.set_ylim(len(measured) - 0.5, -0.9 if relative else -0.5)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if relative:
        _change_axis(axes, [row for row, _ in measured], data.comparison.bf16_perplexity)
    else:
        axes.set_xlabel("perplexity, lower is better")


def _change_axis(axes: Axes, rows: Sequence[Candidate], base: float | None) -> None:
    """Percent over BF16: linear while all are close, else linear up to 1 % and logarithmic beyond."""
    ends = [(row.change_percent or 0.0) + sign * (row.standard_error or 0.0) for row in rows for sign in (-1, 1)]
    low, high = min(0.0, *ends), max(1.0, *ends)
    if high > _LINEAR_PERCENT:
        axes.set_xscale("symlog", linthresh=1, linscale=0.5)
        decades = math.ceil(math.log10(high))
        powers = [10.0**power for power in range(0, decades + 1, 1 if decades < 4 else 2)]
        axes.xaxis.set_major_locator(FixedLocator([-power for power in powers if -power >= low] + [0.0, *powers]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(1.3 * low - 0.3, high * 1.5)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: wording.tick(value)))
    axes.set_xlabel("rise of perplexity, lower is better")
    axes.axvline(0, color=INK.light, linewidth=1.2)
    text = "BF16" if base is None else f"BF16 {wording.perplexity(base)}"
    axes.annotate(text, (0, -0.9), (5, -3), textcoords="offset points", va="top", weight="bold")


def draw_errors(figure: FigureBase, data: ReportData) -> None:
    """Output error against the layer, one line per method."""
    axes = figure.subplots()
    colours, markers = method_colours(data.methods), method_markers(data.methods)
    kept = _kept(data)
    few = len(data.layers) <= FEW_LAYERS
    for error in data.errors:
        axes.plot(
            range(len(data.layers)),
            positive(error.layers),
            color=colours[error.method].light,
            linewidth=2.6 if error.method == kept else 1.4,
            marker=markers[error.method] if few else None,
            markersize=4.5,
            zorder=3 if error.method == kept else 2,
        )
    value_axis(axes, [value for error in data.errors for value in error.layers], start=0)
    layer_axis(axes, data.layers)
    axes.set_ylabel("relative output error")
    label_ends(
        axes,
        [End(wording.plain(e.method), e.layers[-1], colours[e.method].light, e.method == kept) for e in data.errors],
    )


def _kept(data: ReportData) -> str | None:
    chosen = data.comparison.chosen if data.comparison else None
    return chosen.method if chosen else None
