"""The heat maps, length by depth, as one picture."""

from __future__ import annotations

import io
import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from oscar_zoo.evaluate.cache_names import cache_title
from oscar_zoo.evaluate.long_context.grid import RulerReport, length_text

PAPER, INK, MUTED = "#ffffff", "#1c2128", "#5d6670"
WRONG, HALF, RIGHT = "#b34a06", "#f3ead9", "#0b6aa8"
"""From orange to blue, which colour-blind readers tell apart, with different lightness."""
INCHES, DPI = 4.2, 150


def render_png(report: RulerReport, title: str) -> bytes:
    """A map per cache: a column per length, a row per depth, the share of right answers in each.

    The same report gives the same bytes with one version of matplotlib.
    """
    caches, lengths, depths = report.caches, report.lengths, report.depths
    columns = math.ceil(len(caches) ** 0.5)
    rows = -(-len(caches) // columns)
    stream = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"text.parse_math": False, "font.size": 9, "text.color": INK})
        height = 0.6 + rows * (1.2 + 0.28 * len(depths))
        figure = Figure(figsize=(columns * INCHES, height), dpi=DPI, facecolor=PAPER)
        figure.set_layout_engine("constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
        axes: Any = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        colours = LinearSegmentedColormap.from_list("right", [WRONG, HALF, RIGHT])
        for axis in axes.flat[len(caches) :]:
            axis.set_visible(False)
        for cache, axis in zip(caches, axes.flat, strict=False):
            shares = np.array(
                [[report.place(cache, n, depth) for n in lengths] for depth in depths], float
            )
            axis.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
            axis.set_title(cache_title(cache), loc="left", fontsize=10, color=INK)
            axis.set_xticks(range(len(lengths)), [length_text(n) for n in lengths])
            axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            axis.tick_params(length=0, labelcolor=MUTED)
            for (row, column), share in np.ndenumerate(shares):
                dark = abs(share - 0.5) > 0.32
                axis.text(
                    column, row, f"{100 * share:.0f}", ha="center", va="center",
                    color=PAPER if dark else INK, fontsize=8,
                )  # fmt: skip
            axis.spines[:].set_visible(False)
        figure.supxlabel("tokens of the prompt", fontsize=9, color=MUTED)
        figure.supylabel("depth of the fact", fontsize=9, color=MUTED)
        figure.savefig(stream, format="png", facecolor=PAPER, metadata={"Software": "oscar-zoo"})
    return stream.getvalue()
