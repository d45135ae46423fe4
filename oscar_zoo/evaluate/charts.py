"""The pictures of `eval --against`, `ruler` and `bench serve`.

Each function gives the bytes of a PNG, of an SVG, or of a page without script that holds the SVG.
The same report gives the same bytes with one version of matplotlib.
"""

from __future__ import annotations

import html
import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from oscar_zoo.evaluate.against_table import LONG, TABLE
from oscar_zoo.evaluate.bench.report import CACHES, LABELS, Cache, Number, Report
from oscar_zoo.evaluate.outcome import AgainstReport, AgainstRow, RulerReport
from oscar_zoo.evaluate.shared import cache_title, length_text

Kind = Literal["png", "svg", "html"]
DPI = 150
PAPER, INK, MUTED, RULE = "#ffffff", "#1c2128", "#5d6670", "#d5dae0"
WRONG, HALF, RIGHT = "#b34a06", "#f3ead9", "#0b6aa8"
"""From orange to blue, which colour-blind readers tell apart, with different lightness."""
_CACHE_COLOURS: dict[Cache, str] = {"bf16": "#0b6aa8", "fp8": "#00795a", "int2": "#b34a06"}
"""Blue, green and orange of Okabe and Ito, darkened until they are legible on white."""
_METHOD_COLOURS = (
    "#0b6aa8", "#0b6aa8", "#6b7480", "#6b7480", "#6b7480", "#a34a86", "#a34a86", "#0a7a5c",
    "#0a7a5c", "#0a7a5c", "#0a7a5c", "#5a4fc0", "#5a4fc0", "#7d6608", "#b34a06",
)  # fmt: skip
"""Of the methods of the table, in its order; relatives have one colour and differ in markers."""
_MARKERS = "DHsXvPp^<>hoXd*"
_TICKS = (2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 16)
_GROUP = 0.78
"""Width of all bars of one case."""
_HEAD: dict[str, Any] = {"loc": "left", "fontsize": 10, "color": INK}
_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": RULE, "axes.grid": True, "axes.labelcolor": MUTED,
    "axes.spines.right": False, "axes.spines.top": False, "font.family": ["DejaVu Sans"],
    "font.size": 9, "grid.color": RULE, "grid.linewidth": 0.6, "svg.fonttype": "none",
    "svg.hashsalt": "oscar-zoo", "text.color": INK, "text.parse_math": False,
    "xtick.color": RULE, "xtick.labelcolor": MUTED, "ytick.color": RULE, "ytick.labelcolor": MUTED,
}  # fmt: skip


@contextmanager
def _drawing(width: float, height: float, title: str) -> Iterator[Figure]:
    """A figure with our settings, whatever matplotlib's configuration file says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        # The name of a model may be written in any script.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
        yield figure


def _saved(figure: Figure, title: str, kind: Kind) -> bytes:
    stream = io.BytesIO()
    if kind == "png":
        figure.savefig(stream, format="png", metadata={"Software": "oscar-zoo"})
        return stream.getvalue()
    nothing: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(stream, format="svg", metadata=nothing)
    if kind == "svg":
        return stream.getvalue()
    svg = stream.getvalue().decode()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
        f" 'unsafe-inline'\"><title>{html.escape(title)}</title></head>"
        f'<body style="margin:2rem;overflow-x:auto">{svg[svg.index("<svg") :]}</body></html>\n'
    ).encode()


def loss_chart(report: AgainstReport, title: str, kind: Kind = "png") -> bytes:
    """Loss against bits: every cache a point, the Pareto front a line. Two panels of the same
    losses: bits of a sequence as it was measured, and of a long one."""
    rows = [row for row in report.rows if row.divergence > 0]
    with _drawing(10.5, 5.6, title) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        short, long = length_text(report.length), length_text(int(LONG))
        left.set_title(f"bits of sequences of {short} tokens, as measured", **_HEAD)
        right.set_title(f"the same losses, bits of sequences of {long} tokens", **_HEAD)
        measured = [(row.bits_per_element_with_windows, row.pareto) for row in rows]
        _losses(left, rows, measured)
        _losses(right, rows, [(r.bits_per_element_at[LONG], r.pareto_at[LONG]) for r in rows])
        left.set_ylabel("KL from the exact cache, nats per position")
        left.set_yscale("log", nonpositive="clip")  # error bars down to nothing do not stretch it
        losses = [row.divergence for row in rows]
        left.set_ylim(min(losses) / 2, max(losses) * 2)
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        figure.legend(
            *left.get_legend_handles_labels(), loc="outside lower left", ncols=5, frameon=False,
            fontsize=8,
        )  # fmt: skip
        return _saved(figure, title, kind)


def _losses(axes: Axes, rows: Sequence[AgainstRow], places: Sequence[tuple[float, bool]]) -> None:
    """The points of every method with error bars and the bits of their codes, and the front, from
    the bits of every row and whether it is on the front."""
    bits, front = zip(*places, strict=True)
    for at, name in enumerate(TABLE):
        own = [i for i, row in enumerate(rows) if row.cache.partition(":")[0] == name]
        own.sort(key=lambda i: bits[i])
        if not own:
            continue
        mine = rows[own[0]].own
        title = rows[own[0]].title.partition(":")[0] if mine else TABLE[name].title
        colour, marker = _METHOD_COLOURS[at], _MARKERS[at]
        x, losses = [bits[i] for i in own], [rows[i].divergence for i in own]
        errors = [rows[i].divergence_error or 0.0 for i in own]
        axes.plot(x, losses, ":", color=colour, linewidth=0.8, alpha=0.5, zorder=2)
        axes.errorbar(
            x, losses, yerr=errors, fmt=marker, color=colour, label=title,
            markersize=11 if mine else 5.5, elinewidth=0.9, zorder=3,
        )  # fmt: skip
        for i in own:
            crowded = _crowded(i, rows, bits)
            axes.annotate(
                (rows[i].title if mine else rows[i].cache).partition(":")[2],
                (bits[i], rows[i].divergence),
                (-5, -4) if crowded else (5, 4), textcoords="offset points", color=colour,
                fontsize=7.5, weight="bold" if mine else "normal",
                ha="right" if crowded else "left", va="top" if crowded else "bottom",
            )  # fmt: skip
    best = sorted((bits[i], rows[i].divergence) for i, one in enumerate(front) if one)
    axes.plot(
        [x for x, _ in best], [y for _, y in best], color=INK, linewidth=1, linestyle=(0, (4, 3)),
        drawstyle="steps-post", label="Pareto front", zorder=1,
    )  # fmt: skip
    axes.set_xlabel("bits of an element, with scales, norms and windows")
    axes.set_xscale("log", base=2)
    low, high = min(bits) * 0.92, max(bits) * 1.08
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator([n for n in _TICKS if low <= n <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _crowded(at: int, rows: Sequence[AgainstRow], bits: Sequence[float]) -> bool:
    """Whether another point is where the text of this one would be, right above it."""
    ratios = (
        (bits[i] / bits[at], rows[i].divergence / rows[at].divergence) for i in range(len(rows))
    )
    return any(1 < right < 1.07 and 1 < above < 2 for right, above in ratios)


def recall_maps(report: RulerReport, title: str, kind: Kind = "png") -> bytes:
    """A map per cache: a column per length, a row per depth, the share of right answers in each.
    Without a family that has depths, a row per family."""
    caches, lengths, depths = report.caches, report.lengths, report.places
    names = [f"{depth:.0%}" for depth in depths] or list(report.families)
    columns = math.ceil(len(caches) ** 0.5)
    rows = -(-len(caches) // columns)
    with _drawing(columns * 4.2, 0.6 + rows * (1.2 + 0.28 * len(names)), title) as figure:
        axes: Any = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        colours = LinearSegmentedColormap.from_list("right", [WRONG, HALF, RIGHT])
        for axis in axes.flat[len(caches) :]:
            axis.set_visible(False)
        for cache, axis in zip(caches, axes.flat, strict=False):
            found = (
                [[report.share(cache, length=n, depth=depth) for n in lengths] for depth in depths]
                if depths
                else [
                    [report.share(cache, family=name, length=n) for n in lengths] for name in names
                ]
            )
            shares = np.array(found, float)
            axis.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
            axis.set_title(cache_title(cache), **_HEAD)
            axis.set_xticks(range(len(lengths)), [length_text(n) for n in lengths])
            axis.set_yticks(range(len(names)), names)
            axis.tick_params(length=0, labelcolor=MUTED)
            axis.grid(visible=False)
            for (row, column), share in np.ndenumerate(shares):
                ink = PAPER if abs(share - 0.5) > 0.32 else INK
                text = f"{100 * share:.0f}"
                axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
            axis.spines[:].set_visible(False)
        figure.supxlabel("tokens of the prompt", fontsize=9, color=MUTED)
        figure.supylabel("depth of the fact" if depths else "family", fontsize=9, color=MUTED)
        return _saved(figure, title, kind)


_Bar = tuple[float, float, float]
"""A figure, and the smallest and the largest of its repeats; zeros where there is none."""


def speed_chart(report: Report) -> bytes:
    """Time per token, time to first token, and capacity, cache beside cache, as a PNG. Of several
    attention backends the best has a bar; lines on the bars reach from the smallest to the largest
    repeat; a case without a figure has a gap."""
    caches = [cache for cache in CACHES if any(side.cache == cache for side in report.sides)]
    cases = [f"{case.batch} × {case.context:,}" for case in report.cases]
    gains = [_ratios(report, partial(report.speedup, case=case)) for case in report.cases]
    compared = [f"{case}\n{gain}" for case, gain in zip(cases, gains, strict=True)]
    weights = "random weights" if report.weights == "random" else "its own weights"
    title = f"{report.model}, {weights}, {report.device}: batch × context"
    width = 5 + (0.6 + 0.45 * len(caches)) * len(cases)
    with _drawing(width, 4.4, title) as figure:
        per_token, first, room = figure.subplots(1, 3, width_ratios=[len(cases), len(cases), 1.6])
        steps = {cache: _values(report, cache, "ms_per_token") for cache in caches}
        _bars(per_token, "ms per token", compared, steps)
        firsts = {cache: _values(report, cache, "ttft_s") for cache in caches}
        _bars(first, "time to first token, s", cases, firsts)
        ratios, sizes = _ratios(report, report.capacity_ratio), dict[Cache, list[_Bar]]()
        for cache in caches:
            sizes[cache] = [(report.capacity(cache) / 1e3,) * 3]
        _bars(room, "cache, k tokens", [ratios], sizes)
        figure.legend(
            *per_token.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False
        )
        return _saved(figure, title, "png")


def _ratios(report: Report, of: Callable[[Cache], float | None]) -> str:
    found = [(LABELS[cache], ratio) for cache in report.compared if (ratio := of(cache))]
    return "\n".join(f"{ratio:.2f}x vs {label}" for label, ratio in found)


def _values(report: Report, cache: Cache, name: Number) -> list[_Bar]:
    """The figure of each case with the side that has the smallest."""
    sides = [side for side in report.sides if side.cache == cache]
    bars = list[_Bar]()
    for case in report.cases:
        results = [result for side in sides if (result := side.of(case)) is not None]
        found = [(getattr(one, name), *ends) for one in results if (ends := one.spread[name])]
        bars.append(min(found, default=(0.0, 0.0, 0.0)))
    return bars


def _bars(axes: Axes, title: str, names: Sequence[str], bars: dict[Cache, list[_Bar]]) -> None:
    width = _GROUP / len(bars)
    for index, (cache, found) in enumerate(bars.items()):
        values = [value for value, _, _ in found]
        places = [place + (index - (len(bars) - 1) / 2) * width for place in range(len(names))]
        errors = [[v - low for v, low, _ in found], [high - v for v, _, high in found]]
        drawn: Any = axes.bar(
            places, values, width, color=_CACHE_COLOURS[cache], label=LABELS[cache], yerr=errors,
            error_kw={"ecolor": INK, "elinewidth": 0.8},
        )  # fmt: skip
        texts = [
            f"{value:,.3g}" if 0 < value < 999.5 else f"{value:,.0f}" if value else ""
            for value in values
        ]
        axes.bar_label(drawn, texts, fontsize=7, color=INK)
    axes.set_title(title, **_HEAD)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.grid(visible=False, axis="x")
