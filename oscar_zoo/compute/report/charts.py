"""The charts of a report, each as SVG for the page, and all of them as one PNG.

Charts have dark text on white, on a light page and on a dark one. A method has one colour and one
marker in every chart. All text that came from outside is plain text: matplotlib's formula mode is
off. The same data gives the same bytes with one version of matplotlib.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from oscar_zoo.artifact.width_selection import VerifiedWidths, WidthSelection
from oscar_zoo.compute.report import page
from oscar_zoo.compute.report.data import Candidate, ClipChart, ReportData, geometric_mean

PAPER, INK, MUTED, RULE, FAINT = "#ffffff", "#1c2128", "#5d6670", "#d5dae0", "#a9b1ba"
K_SIDE, V_SIDE = "#0b6aa8", "#b34a06"


WIDTH, DPI = 10.0, 150
"""Inches of every chart, and pixels per inch of the PNG."""
_METHODS: Mapping[str, str] = {
    "identity": "#6b7480", "hadamard": "#a34a86", "oscar": "#0f62b0", "oscar-exact": "#2b8cb8",
    "oscar-per-head": "#0a7a5c", "wush": "#bf4a04", "wush-tuned": "#8c3b3b",
}  # fmt: skip
"""Hues of Okabe and Ito's palette for colour-blind readers, darkened until they are legible."""
_OTHERS = ("#7d6608", "#5a4fc0", "#3f6b2a", "#7a4a1e", "#44546a")
"""Colours of further methods, in turn."""
_MARKERS = "XsD^voP<>ph*"
_WIDE_RANGE = 8
"""Values that span more than this factor get a log axis."""
_LINEAR_PERCENT = 15
"""Changes of perplexity below this fit on one linear axis."""
_ROUNDING = 1e-9
"""Shares of a spectrum below this are rounding errors of the eigenvalues."""
_LEAST = 1e-7
"""Divergence, in nats, below which nothing can be told; log axes end there."""
_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True, "axes.grid": True, "axes.linewidth": 0.8,
    "axes.edgecolor": RULE, "axes.facecolor": "none",
    "axes.labelcolor": MUTED, "axes.labelsize": 9,
    "axes.spines.right": False, "axes.spines.top": False,
    "axes.titlecolor": INK, "axes.titlelocation": "left",
    "axes.titlesize": 10, "axes.titleweight": "bold",
    "figure.facecolor": "none", "savefig.facecolor": "none",
    "font.family": ["DejaVu Sans"], "font.size": 9, "text.color": INK,
    "grid.color": RULE, "grid.linewidth": 0.6, "lines.markersize": 4,
    "lines.solid_capstyle": "round", "svg.fonttype": "none", "text.parse_math": False,
    "xtick.color": RULE, "xtick.labelcolor": MUTED, "xtick.labelsize": 9,
    "ytick.color": RULE, "ytick.labelcolor": MUTED, "ytick.labelsize": 9,
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """One chart of a report: a caption says what to look for, `draw` draws into an empty figure or
    subfigure of this height in inches."""

    title: str
    caption: str
    height: float
    draw: Callable[[Any, ReportData], None]
    wanted: Callable[[ReportData], object]


def charts_of(data: ReportData) -> list[Chart]:
    """The charts that `data` has numbers for, in the order of reading."""
    return [chart for chart in _CHARTS if chart.wanted(data)]


def render_svg(chart: Chart, data: ReportData) -> bytes:
    """One chart as an SVG document."""
    stream = io.BytesIO()
    with drawing(), matplotlib.rc_context({"svg.hashsalt": chart.title}):
        figure = Figure(figsize=(WIDTH, chart.height), facecolor=PAPER, layout="constrained")
        chart.draw(figure, data)
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(stream, format="svg", facecolor=PAPER, metadata=nothing)
    return stream.getvalue()


def render_png(data: ReportData) -> bytes:
    """The answer and all charts below each other in one picture, 1500 pixels wide."""
    charts = charts_of(data)
    answer = textwrap.wrap("".join(page.answer(data)), 120)
    heights = [0.6 + 0.2 * len(answer), *(chart.height + 0.4 for chart in charts)]
    stream = io.BytesIO()
    with drawing():
        size = (WIDTH, sum(heights))
        figure = Figure(figsize=size, dpi=DPI, facecolor=PAPER, layout="constrained")
        FigureCanvasAgg(figure)
        rows: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
        head, *parts = rows[:, 0]
        title = textwrap.shorten(page.plain(data.title), 80, placeholder=" …")
        head.text(0.01, 0.9, title, va="top", fontsize=14, weight="bold")
        head.text(0.01, 0.9 - 0.35 / heights[0], "\n".join(answer), va="top", fontsize=10)
        for chart, part in zip(charts, parts, strict=True):
            part.suptitle(chart.title, x=0.01, ha="left", fontsize=11, weight="bold")
            chart.draw(part, data)
        figure.savefig(stream, format="png", facecolor=PAPER, metadata={"Software": "oscar-zoo"})
    return stream.getvalue()


@contextmanager
def drawing() -> Iterator[None]:
    """Use our settings of matplotlib instead of the user's; restore them at the end."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        # the name of a model may be in any script, and no font has them all
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _perplexity(figure: FigureBase, data: ReportData) -> None:
    """One row per method and one dot per candidate; perplexity itself when BF16 is not known."""
    assert data.comparison is not None
    measured = [
        row
        for row in data.comparison.candidates
        if row.perplexity is not None or row.change_percent is not None
    ]
    relative = all(row.change_percent is not None for row in measured)
    methods = list(dict.fromkeys(row.method for row in measured))
    styles = _styles(data.methods)
    axes = figure.subplots()
    for y, method in enumerate(methods):
        colour, marker = styles[method]
        tried = [row for row in measured if row.method == method]
        for row in tried:
            x, error = _position(row, relative)
            hollow = row.clip_k in (0, 1) and row.clip_v in (0, 1)
            face: Any = {"markerfacecolor": PAPER if hollow else colour, "markersize": 6.5}
            axes.errorbar(x, y, xerr=error or None, fmt=marker, color=colour, **face)
        _write_best(axes, y, tried, relative)
    axes.set_yticks(range(len(methods)), [page.plain(method) for method in methods])
    for label, method in zip(axes.get_yticklabels(), methods, strict=True):
        label.set(color=styles[method][0], weight="bold" if method == data.kept else "normal")
    axes.set_ylim(len(methods) - 0.5, -0.9 if relative else -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{'rise of ' if relative else ''}perplexity, lower is better")
    if relative:
        _change_axis(axes, measured, data.comparison.bf16_perplexity)


def _position(row: Candidate, relative: bool) -> tuple[float, float]:
    """Where a candidate stands, and its standard error; a broken model stands at the edge."""
    if not relative:
        return row.perplexity or 0.0, 0.0
    return min(row.change_percent or 0.0, page.BROKEN), min(row.standard_error or 0.0, page.BROKEN)


def _write_best(axes: Axes, y: float, tried: Sequence[Candidate], relative: bool) -> None:
    """Write the number of the kept candidate, or else of the best one, right of its row."""
    best = min(tried, key=lambda row: (not row.chosen, _position(row, relative)[0]))
    end = max(sum(_position(row, relative)) for row in tried)
    change, perplexity = best.change_percent or 0.0, best.perplexity or 0.0
    number = page.change(change) if relative else page.perplexity(perplexity)
    axes.annotate(
        number, (end, y), (8, 0), textcoords="offset points", va="center",
        weight="bold" if best.chosen else "normal",
    )  # fmt: skip


def _change_axis(axes: Axes, rows: Sequence[Candidate], base: float | None) -> None:
    """Percent over BF16: linear when all are close, else linear to 1 % and logarithmic beyond."""
    places = [_position(row, True) for row in rows]
    low = min(0.0, *(x - error for x, error in places))
    high = max(1.0, *(x + error for x, error in places))
    if high > _LINEAR_PERCENT:
        low = max(low, -100.0)  # perplexity cannot fall by more than all of it
        decades = math.ceil(math.log10(high))
        powers = [10.0**power for power in range(0, decades + 1, 1 if decades < 4 else 2)]
        axes.set_xscale("symlog", linthresh=1, linscale=0.8)
        negative = [-power for power in powers if -power >= low]
        axes.xaxis.set_major_locator(FixedLocator([*negative, 0.0, *powers]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(1.3 * low - 0.2, high * 1.5)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: page.tick(value)))
    axes.axvline(0, color=INK, linewidth=1.2)
    label = "BF16" if base is None else f"BF16 {page.perplexity(base)}"
    axes.annotate(label, (0, -0.9), (5, -3), textcoords="offset points", va="top", weight="bold")


def _layers(figure: FigureBase, data: ReportData) -> None:
    """Output error of every method, and headroom of both sides, against the layer."""
    panels = figure.subplots(1, bool(data.errors) + (data.headroom is not None), squeeze=False)[0]
    styles = _styles(data.methods)
    for error in data.errors:
        colour, marker = styles[error.method]
        width = 2.6 if error.method == data.kept else 1.4
        style: Any = {"color": colour, "marker": marker, "linewidth": width}
        panels[0].plot(
            data.layers, _positive(error.layers), label=page.plain(error.method), **style
        )
    if data.errors:
        panels[0].set_ylabel("relative output error")
        _value_axis(panels[0], [value for error in data.errors for value in error.layers])
    if data.headroom is not None:
        sides = (("keys", data.headroom.k, K_SIDE, "o"), ("values", data.headroom.v, V_SIDE, "s"))
        for name, values, colour, marker in sides:
            label = f"{name}, mean {geometric_mean(values):.2f} ×"
            panels[-1].plot(data.layers, values, color=colour, marker=marker, label=label)
        panels[-1].set_ylabel("headroom over any rotation")
        panels[-1].axhline(1, color=INK, linewidth=1.2)
        _value_axis(panels[-1], [*data.headroom.k, *data.headroom.v])
    for axes in panels:
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.legend(fontsize=8, frameon=False)


def _value_axis(axes: Axes, values: Sequence[float]) -> None:
    """A log axis for values that span much, else a linear one."""
    low = min((value for value in values if value > 0), default=1.0)
    axes.set_yscale("log" if max(values) > _WIDE_RANGE * low else "linear")
    _label_log(axes, few=max(values) < 100 * low)


def _label_log(axes: Axes, *, few: bool = True) -> None:
    """Labels at powers of ten, and where they are `few` at 2 and 5 times these."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(
        lambda value, _: f"{value:g}" if few and f"{value:e}"[0] in "25" else ""
    )


def _clip(figure: FigureBase, data: ReportData) -> None:
    """Change of the error with the clip ratio; thin lines are layers, the thick one their mean."""
    assert data.clip is not None
    sides = (("Keys", data.clip.k, K_SIDE), ("Values", data.clip.v, V_SIDE))
    present = [(name, curve, colour) for name, curve, colour in sides if curve is not None]
    panels = figure.subplots(1, len(present), sharey=True, squeeze=False)[0]
    for axes, (name, curve, colour) in zip(panels, present, strict=True):
        axes.set_title(f"{name}: {page.plain(curve.error)} error")
        _clip_panel(axes, curve, colour)
    panels[0].set_ylabel("error against no clipping")
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: page.tick(value)))


def _clip_panel(axes: Axes, curve: ClipChart, colour: str) -> None:
    """Change in percent against the largest ratio, which clips nothing."""
    *layers, mean = (
        [100 * (value / line[-1] - 1) if line[-1] else 0.0 for value in line]
        for line in (*curve.layers, curve.mean)
    )
    for layer in layers:
        axes.plot(curve.ratios, layer, color=FAINT, linewidth=0.8, alpha=0.7)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.plot(curve.ratios, mean, color=colour, linewidth=2.4)
    if curve.chosen is not None:
        chosen = curve.chosen
        at = min(range(len(curve.ratios)), key=lambda index: abs(curve.ratios[index] - chosen))
        axes.plot([curve.ratios[at]], [mean[at]], "o", color=colour, markersize=7)
        axes.annotate(
            f"served: {page.clip(chosen)}", (curve.ratios[at], mean[at]), (0, -9),
            textcoords="offset points", ha="center", va="top", color=colour, weight="bold",
        )  # fmt: skip
    axes.xaxis.set_major_locator(FixedLocator(list(curve.ratios)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: page.clip(min(ratio, 1))))
    axes.set_xlabel("clip ratio")


def _spectra(figure: FigureBase, data: ReportData) -> None:
    """Eigenvalue shares of both targets, one line per layer, coloured by depth."""
    assert data.spectra is not None
    left, right = figure.subplots(1, 2, sharey=True)
    scale = ScalarMappable(Normalize(data.layers[0], data.layers[-1]), "viridis_r")
    depth = scale.to_rgba(np.array(data.layers))
    sides = ((left, "Keys", data.spectra.k), (right, "Values", data.spectra.v))
    for axes, name, spectrum in sides:
        for colour, shares in zip(depth, spectrum.layers, strict=True):
            axes.plot(spectrum.ranks, _positive(shares), color=colour, linewidth=1.1)
        axes.set_title(f"{name}: {page.target(spectrum.target)}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("eigenvalue, largest first")
        axes.axhline(1 / spectrum.dim, color=INK, linewidth=1, linestyle="--")
        axes.annotate("flat", (1, 1 / spectrum.dim), (4, 2), textcoords="offset points")
    shown = [share for *_, spectrum in sides for layer in spectrum.layers for share in layer]
    left.set_ylim(min((share for share in shown if share > _ROUNDING), default=0.1) / 1.5, 1.4)
    left.set_ylabel("share of the total")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: page.share(value)))
    left.yaxis.set_minor_locator(NullLocator())
    figure.colorbar(scale, ax=[left, right], label="layer", ticks=MaxNLocator(6, integer=True))


def _positive(values: Sequence[float]) -> list[float]:
    """With gaps for zeros, which have no place on a log axis."""
    return [value if value > 0 else math.nan for value in values]


def _styles(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Method -> colour and marker; methods that have none of their own get the next ones."""
    others = [method for method in methods if method not in _METHODS]
    spare = {method: _OTHERS[index % len(_OTHERS)] for index, method in enumerate(others)}
    colours = {**_METHODS, **spare}
    markers = dict(zip(colours, itertools.cycle(_MARKERS), strict=False))
    return {method: (colours[method], markers[method]) for method in methods}


def _widths(figure: Any, data: ReportData) -> None:
    """The curve, and beside it the gains by layer where single raises were measured."""
    found = data.widths
    assert found is not None
    if found.gains_k is None:
        _curve(figure.subplots(), found)
        return
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (3, 2)})
    _curve(left, found)
    columns = (found.gains_k, found.gains_v) if found.gains_v else (found.gains_k,)
    shown = [[max(gain, 0.0) for gain in row] for row in zip(*columns, strict=True)]
    image = right.imshow(shown, aspect="auto", cmap="Oranges", vmin=0)
    for at, layer in enumerate(found.layers):
        for column, side in enumerate("kv"):
            if (layer, side) in found.raised:
                right.plot(column, at, "o", color=V_SIDE if side == "v" else K_SIDE, markersize=6)
    right.set_xticks(range(len(columns)), ["keys", "values"] if found.gains_v else ["latents"])
    stride = max(1, -(-len(found.layers) // 12))
    right.set_yticks(range(0, len(shown), stride), [str(one) for one in found.layers[::stride]])
    right.set_ylabel("layer")
    right.grid(visible=False)
    right.set_title("KL taken away by raising alone; dot: 4 bits")
    figure.colorbar(image, ax=right, label="nats")


def _curve(axes: Any, found: WidthSelection) -> None:
    """Predicted divergence as a line with its standard error, measured points with theirs. The sum
    of single raises is no prediction from where one of them alone takes nothing away."""
    told = [step for step in found.steps if step.predicted is not None]
    pairs = enumerate(itertools.pairwise(step.predicted or 0.0 for step in told), 1)
    told = told[: next((at for at, (before, after) in pairs if after >= before), len(told))]
    if told:
        bits = [step.bits for step in told]
        middle = [max(step.predicted or 0.0, _LEAST) for step in told]
        errors = [step.predicted_error or 0.0 for step in told]
        low = [max(value - error, value / 4) for value, error in zip(middle, errors, strict=True)]
        high = [value + error for value, error in zip(middle, errors, strict=True)]
        axes.fill_between(bits, low, high, color=FAINT, alpha=0.35, linewidth=0)
        axes.plot(bits, middle, color=MUTED, linewidth=1.6, label="predicted from single raises")
    points = list[tuple[float, float]]()
    for at, step in enumerate(found.steps):
        if step.verified is not None and step.verified.divergence is not None:
            points.append((step.bits, max(step.verified.divergence, _LEAST)))
            _measured(axes, step.bits, step.verified, kept=at == found.chosen)
    if points:
        axes.plot(*zip(*points, strict=True), ":", color=INK, linewidth=1, label="measured")
    axes.set_yscale("log")
    _label_log(axes)
    axes.set_xlabel("bits per element, scales included")
    axes.set_ylabel("KL from the exact cache, nats")
    axes.margins(x=0.12, y=0.18)
    axes.legend(fontsize=8, frameon=False)


def _measured(axes: Any, bits: float, found: VerifiedWidths, *, kept: bool) -> None:
    value, error = max(found.divergence or 0.0, _LEAST), found.divergence_error or 0.0
    down = min(error, 0.75 * value)
    axes.errorbar(
        bits, value, yerr=[[down], [error]], fmt="o", color=K_SIDE if kept else INK,
        markersize=8 if kept else 5, label="measured, kept" if kept else None,
    )  # fmt: skip
    words = [f"{value:.2g}"]
    words += [] if found.change_percent is None else [page.change(found.change_percent)]
    words += [] if found.recall is None else [f"recall {100 * found.recall:.1f} %"]
    axes.annotate(
        "\n".join(words), (bits, value), (8, 4), textcoords="offset points", fontsize=8,
        weight="bold" if kept else "normal", color=INK,
    )  # fmt: skip


_CHARTS = (
    Chart(
        "Perplexity against BF16",
        "Closer to the BF16 line is better. Bars are one standard error; hollow is without"
        " clipping.",
        2.9,
        _perplexity,
        lambda data: (
            data.comparison
            and any(row.perplexity is not None for row in data.comparison.candidates)
        ),
    ),
    Chart(
        "Bits and what they buy",
        "How far the cache moves what the model says next, with keys or values of more and more"
        " layers at 4 bits. Few of them carry most of it. The prediction ends where a raise alone"
        " gains nothing.",
        3.4,
        _widths,
        lambda data: data.widths,
    ),
    Chart(
        "Output error and headroom by layer",
        "Lower errors are better; one bad layer decides more than the mean. Headroom says how many"
        " times less error the best transform could have than any rotation.",
        3.3,
        _layers,
        lambda data: data.errors or data.headroom,
    ),
    Chart(
        "Clip curves",
        "The thick line is the mean of the thin ones, the layers. Below zero clipping helps.",
        3.1,
        _clip,
        lambda data: data.clip and (data.clip.k or data.clip.v),
    ),
    Chart(
        "Eigenvalue spectra of the fit's targets",
        "The steeper a line crosses the flat one, the more a rotation helps.",
        3.4,
        _spectra,
        lambda data: data.spectra,
    ),
)
