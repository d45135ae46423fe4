"""Charts that compare methods: perplexity against BF16, and output error by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from oscar_zoo.compute.report import text
from oscar_zoo.compute.report.axes import (
    FEW_LAYERS,
    End,
    label_ends,
    layer_axis,
    positive,
    value_axis,
    weight,
)
from oscar_zoo.compute.report.data import Candidate, ReportData
from oscar_zoo.compute.report.style import INK, PAGE, method_colours, method_markers

_LINEAR_PERCENT = 15
"""Changes below this fit one linear axis."""


def draw_perplexity(figure: FigureBase, data: ReportData) -> None:
    """A row per method, a dot with its standard error per candidate, hollow without clipping; BF16
    is a line.

    Plain perplexities where they were not compared with BF16.
    """
    assert data.comparison is not None
    measured = [row for row in data.comparison.candidates if row.perplexity is not None]
    relative = all(row.change_percent is not None for row in measured)
    methods = list(dict.fromkeys(row.method for row in measured))
    colours, markers = method_colours(data.methods), method_markers(data.methods)
    axes = figure.subplots()
    for y, method in enumerate(methods):
        tried = [row for row in measured if row.method == method]
        for row in tried:
            _dot(
                axes,
                y,
                row,
                colour=colours[method].light,
                marker=markers[method],
                relative=relative,
            )
        _best_value(axes, y, tried, relative=relative)
    axes.set_yticks(range(len(methods)), [text.plain(method) for method in methods])
    for label, method in zip(axes.get_yticklabels(), methods, strict=True):
        label.set(color=colours[method].light, weight=weight(method == _kept(data)))
    axes.set_ylim(len(methods) - 0.5, -0.9 if relative else -0.5)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if relative:
        _change_axis(axes, measured, data.comparison.bf16_perplexity)
    else:
        axes.set_xlabel("perplexity, lower is better")


def _position(row: Candidate, *, relative: bool) -> tuple[float, float]:
    """Where a candidate stands, and its standard error; what is broken stands at the edge."""
    if not relative:
        return row.perplexity or 0.0, 0.0
    return min(row.change_percent or 0.0, text.BROKEN), min(row.standard_error or 0.0, text.BROKEN)


def _dot(axes: Axes, y: float, row: Candidate, *, colour: str, marker: str, relative: bool) -> None:
    x, error = _position(row, relative=relative)
    hollow = row.clip_k in (0, 1) and row.clip_v in (0, 1)
    face: dict[str, Any] = {"markerfacecolor": PAGE.light if hollow else colour, "markersize": 6.5}
    axes.errorbar(x, y, xerr=error or None, fmt=marker, color=colour, elinewidth=1.6, **face)


def _best_value(axes: Axes, y: float, tried: Sequence[Candidate], *, relative: bool) -> None:
    """Write the number of the kept candidate, or else of the best one, to the right of all of its
    method."""
    best = min(tried, key=lambda row: (not row.chosen, row.perplexity))
    end = max(sum(_position(row, relative=relative)) for row in tried)
    number = (
        text.change(best.change_percent or 0.0)
        if relative
        else text.perplexity(best.perplexity or 0.0)
    )
    bold = weight(best.chosen)
    axes.annotate(
        number, (end, y), xytext=(8, 0), textcoords="offset points", va="center", weight=bold
    )


def _change_axis(axes: Axes, rows: Sequence[Candidate], base: float | None) -> None:
    """Percent over BF16: linear while all are close, else linear up to 1 % and logarithmic
    beyond."""
    places = [_position(row, relative=True) for row in rows]
    low, high = (
        min(0.0, *(x - error for x, error in places)),
        max(1.0, *(x + error for x, error in places)),
    )
    if high > _LINEAR_PERCENT:
        low = max(low, -100.0)  # an error bar cannot end below no perplexity at all
        decades = math.ceil(math.log10(high))
        powers = [10.0**power for power in range(0, decades + 1, 1 if decades < 4 else 2)]
        axes.set_xscale("symlog", linthresh=1, linscale=0.8)
        axes.xaxis.set_major_locator(
            FixedLocator([-power for power in powers if -power >= low] + [0.0, *powers])
        )
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(1.3 * low - 0.2, high * 1.5)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text.tick(value)))
    axes.set_xlabel("rise of perplexity, lower is better")
    axes.axvline(0, color=INK.light, linewidth=1.2)
    label = "BF16" if base is None else f"BF16 {text.perplexity(base)}"
    axes.annotate(label, (0, -0.9), (5, -3), textcoords="offset points", va="top", weight="bold")


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
        [
            End(text.plain(e.method), e.layers[-1], colours[e.method].light, e.method == kept)
            for e in data.errors
        ],
    )


def _kept(data: ReportData) -> str | None:
    chosen = data.comparison.chosen if data.comparison else None
    return chosen.method if chosen else None
