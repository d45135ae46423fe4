"""Axes that charts share: layers side by side, values that choose their scale, lines that are named
where they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

_WIDE_RANGE = 8
"""Values that span more than this factor get a log axis."""
FEW_LAYERS = 16
"""So many get a marker each."""
_MAX_TICKS = 12
_LABEL = 1.35 * 9 / 72
"""Inches between two labels."""


@dataclass(frozen=True)
class End:
    """The right end of a line: its name, height and colour, and whether it stands out."""

    name: str
    value: float
    colour: str
    bold: bool = False


def positive(values: Sequence[float]) -> list[float]:
    """Zeros as gaps: they have no place on a log axis."""
    return [value if value > 0 else math.nan for value in values]


def weight(bold: bool) -> str:
    """Of a font."""
    return "bold" if bold else "normal"


def value_axis(axes: Axes, values: Sequence[float], *, start: float) -> None:
    """A log y axis with plain numbers where `values` span much, else a linear one from `start`."""
    low, high = (
        min((value for value in values if value > 0), default=1.0),
        max(*values, 1.1 * start, 1e-12),
    )
    if high <= _WIDE_RANGE * low:
        axes.set_ylim(start - 0.04 * (high - start), high + 0.06 * (high - start))
        return
    decades = math.log10(high / low)
    steps = (1.0, 2.0, 3.0, 5.0) if decades < 1.5 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    axes.set_yscale("log")
    axes.set_ylim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:.0e}")
    )
    axes.yaxis.set_minor_locator(NullLocator())


def layer_axis(axes: Axes, layers: Sequence[int]) -> None:
    """Ticks carry the model's layer numbers; layers stand side by side however they are
    numbered."""
    step = max(1, math.ceil(len(layers) / _MAX_TICKS))
    at = list(range(0, len(layers), step))
    axes.set_xticks(at, [str(layers[position]) for position in at])
    axes.set_xlim(-0.3, len(layers) - 0.7)
    axes.set_xlabel("layer")


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write each line's name to the right of its end, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    scale = math.log if axes.get_yscale() == "log" else float
    heights = [
        (scale(min(max(end.value, low), high)) - scale(low)) / (scale(high) - scale(low))
        if end.value > 0
        else 0.0
        for end in ends
    ]
    about = (
        axes.figure.bbox.height / axes.figure.dpi * 0.78
    )  # inches of the axes, before the layout is known
    for end, height, place in zip(ends, heights, apart(heights, _LABEL / about), strict=True):
        line = {
            "arrowstyle": "-",
            "color": end.colour,
            "linewidth": 0.8,
            "relpos": (0, 0.5),
            "shrinkA": 1,
            "shrinkB": 1,
        }
        axes.annotate(
            end.name,
            (1, height),
            (1.025, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=end.colour,
            weight=weight(end.bold),
            arrowprops=line,
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """`heights` moved as little as needed to be `gap` apart, in the same order, within 0 and 1 if
    they fit."""

    def bottom(cluster: list[int]) -> float:
        """Where the lowest of a cluster stands: around the mean of its heights, or at the edge."""
        span = gap * (len(cluster) - 1)
        middle = sum(heights[index] for index in cluster) / len(cluster)
        return max(min(middle - span / 2, 1 - span), 0.0)

    clusters: list[list[int]] = []
    for index in sorted(range(len(heights)), key=lambda index: heights[index]):
        clusters.append([index])
        while len(clusters) > 1 and bottom(clusters[-1]) < bottom(clusters[-2]) + gap * len(
            clusters[-2]
        ):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    steps = {
        index: bottom(cluster) + gap * step
        for cluster in clusters
        for step, index in enumerate(cluster)
    }
    return [steps[index] for index in range(len(heights))]
