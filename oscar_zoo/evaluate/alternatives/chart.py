"""Loss against bits as one picture: every cache a point, the Pareto front a line.

Colours and markers tell methods apart, numbers beside the markers are the bits of a code. The same
report gives the same bytes with one version of matplotlib.
"""

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
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from oscar_zoo.evaluate.alternatives.report import AgainstReport, AgainstRow
from oscar_zoo.evaluate.alternatives.table import OWN, TABLE
from oscar_zoo.evaluate.long_context.chart import DPI, INK, MUTED, PAPER
from oscar_zoo.evaluate.long_context.grid import length_text

LONG = "32768"
"""Tokens of a sequence in the second panel."""
RULE = "#d5dae0"
_COLOURS = (
    "#0b6aa8", "#6b7480", "#6b7480", "#6b7480", "#a34a86", "#a34a86", "#0a7a5c", "#0a7a5c",
    "#0a7a5c", "#5a4fc0", "#5a4fc0", "#7d6608",
)  # fmt: skip
"""Of the methods of the table, in its order; relatives have one colour and differ in markers."""
_MARKERS = "DsXvPp^<>oXd"
_OWN = ("#b34a06", "*")
_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": RULE, "axes.grid": True, "axes.labelcolor": MUTED,
    "axes.spines.right": False, "axes.spines.top": False, "font.family": ["DejaVu Sans"],
    "font.size": 9, "grid.color": RULE, "grid.linewidth": 0.6, "svg.fonttype": "none",
    "svg.hashsalt": "oscar-zoo", "text.color": INK, "text.parse_math": False,
    "xtick.color": RULE, "xtick.labelcolor": MUTED, "ytick.color": RULE, "ytick.labelcolor": MUTED,
}  # fmt: skip


def render(report: AgainstReport, title: str, *, svg: bool = False) -> bytes:
    """Two panels of the same losses: bits of a sequence as it was measured, and of a long one.

    Args:
        svg: an SVG document, else a PNG.
    """
    rows = [row for row in report.rows if row.divergence > 0]
    stream = io.BytesIO()
    with _drawing():
        figure = Figure(figsize=(10.5, 5.6), dpi=DPI, facecolor=PAPER, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
        left, right = figure.subplots(1, 2, sharey=True)
        length = report.facts["length"]
        short = [row.bits_per_element_with_windows for row in rows]
        _panel(left, rows, short, [row.pareto for row in rows])
        left.set_title(f"bits of sequences of {length_text(length)} tokens, as measured", **_HEAD)
        left.set_ylabel("KL from the exact cache, nats per position")
        long = [row.bits_per_element_at[LONG] for row in rows]
        _panel(right, rows, long, [row.pareto_at[LONG] for row in rows])
        right.set_title(
            f"the same losses, bits of sequences of {length_text(int(LONG))} tokens", **_HEAD
        )
        _loss_axis(left, rows)
        figure.legend(
            *left.get_legend_handles_labels(), loc="outside lower left", ncols=5, frameon=False,
            fontsize=8,
        )  # fmt: skip
        metadata: dict[str, Any] = {"Software": "oscar-zoo"}
        if svg:
            metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        kind = "svg" if svg else "png"
        figure.savefig(stream, format=kind, facecolor=PAPER, metadata=metadata)
    return stream.getvalue()


_HEAD: dict[str, Any] = {"loc": "left", "fontsize": 10, "color": INK}


@contextmanager
def _drawing() -> Iterator[None]:
    """Within the block matplotlib has our settings, whatever its configuration file says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _panel(
    axes: Axes, rows: Sequence[AgainstRow], bits: Sequence[float], front: Sequence[bool]
) -> None:
    """All methods, and the front as steps."""
    for name in TABLE:
        own = [i for i, row in enumerate(rows) if row.cache.partition(":")[0] == name]
        own.sort(key=lambda i: bits[i])
        if own:
            _method(axes, name, [rows[i] for i in own], [bits[i] for i in own])
            for i in own:
                _width(axes, rows[i], bits[i], crowded=_crowded(i, rows, bits))
    best = sorted((bits[i], rows[i].divergence) for i, one in enumerate(front) if one)
    axes.plot(
        [x for x, _ in best], [y for _, y in best], color=INK, linewidth=1, linestyle=(0, (4, 3)),
        drawstyle="steps-post", label="Pareto front", zorder=1,
    )  # fmt: skip
    axes.set_xlabel("bits of an element, with scales, norms and windows")
    axes.set_xscale("log", base=2)
    low, high = min(bits), max(bits)
    axes.set_xlim(low * 0.92, high * 1.08)
    axes.xaxis.set_major_locator(
        FixedLocator([n for n in _TICKS if low * 0.92 <= n <= high * 1.08])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


_TICKS = (2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 16)


def _method(axes: Axes, name: str, rows: Sequence[AgainstRow], bits: Sequence[float]) -> None:
    """The points of one method with error bars."""
    colour, marker = _style(name)
    losses = [row.divergence for row in rows]
    errors = [row.divergence_error or 0.0 for row in rows]
    axes.plot(bits, losses, ":", color=colour, linewidth=0.8, alpha=0.5, zorder=2)
    axes.errorbar(
        bits, losses, yerr=errors, fmt=marker, color=colour, label=TABLE[name].title,
        markersize=11 if name == OWN else 5.5, elinewidth=0.9, zorder=3,
    )  # fmt: skip


def _width(axes: Axes, row: AgainstRow, x: float, *, crowded: bool) -> None:
    """The bits of a code beside its point."""
    name, _, width = row.cache.partition(":")
    own = name == OWN
    axes.annotate(
        width, (x, row.divergence), (-5, -4) if crowded else (5, 4), textcoords="offset points",
        color=_style(name)[0], fontsize=7.5, weight="bold" if own else "normal",
        ha="right" if crowded else "left", va="top" if crowded else "bottom",
    )  # fmt: skip


def _crowded(at: int, rows: Sequence[AgainstRow], bits: Sequence[float]) -> bool:
    """Whether another point is where the text of this one would be, right above it."""
    ratios = (
        (bits[i] / bits[at], rows[i].divergence / rows[at].divergence) for i in range(len(rows))
    )
    return any(1 < right < 1.07 and 1 < above < 2 for right, above in ratios)


def _style(name: str) -> tuple[str, str]:
    """Colour and marker of a method."""
    at = list(TABLE).index(name)
    return _OWN if name == OWN else (_COLOURS[at % len(_COLOURS)], _MARKERS[at % len(_MARKERS)])


def _loss_axis(axes: Axes, rows: Sequence[AgainstRow]) -> None:
    """A log axis that error bars down to nothing do not stretch."""
    axes.set_yscale("log", nonpositive="clip")
    losses = [row.divergence for row in rows]
    axes.set_ylim(min(losses) / 2, max(losses) * 2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
