"""Charts of layers: headroom, clip curves, and the spectra of what a fit targets."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from oscar_zoo.compute.report import text
from oscar_zoo.compute.report.axes import (
    FEW_LAYERS,
    End,
    label_ends,
    layer_axis,
    positive,
    value_axis,
)
from oscar_zoo.compute.report.data import ClipChart, ReportData, Spectrum, geometric_mean
from oscar_zoo.compute.report.style import (
    DEPTH_STEPS,
    FAINT,
    INK,
    K_SIDE,
    MUTED,
    PAGE,
    V_SIDE,
    depth_colours,
)


def draw_headroom(figure: FigureBase, data: ReportData) -> None:
    """Headroom of both sides against the layer, standing on 1."""
    assert data.headroom is not None
    axes = figure.subplots()
    few = len(data.layers) <= FEW_LAYERS
    ends = []
    for name, values, colour, marker in (
        ("keys", data.headroom.k, K_SIDE.light, "o"),
        ("values", data.headroom.v, V_SIDE.light, "s"),
    ):
        shown = [max(value, 1.0) for value in values]
        axes.plot(
            range(len(shown)), shown, color=colour, linewidth=1.8, marker=marker if few else None
        )
        mean = geometric_mean(values)
        ends.append(End(f"{name}, mean {mean:.2f} ×", shown[-1], colour, bold=True))
    value_axis(axes, [1.0, *data.headroom.k, *data.headroom.v], start=1)
    axes.axhline(1, color=INK.light, linewidth=1.2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ×"))
    layer_axis(axes, data.layers)
    axes.set_ylabel("headroom over any rotation")
    label_ends(axes, ends)


def draw_clip(figure: FigureBase, data: ReportData) -> None:
    """Change of the error with the clip ratio: thin lines are layers, the thick one is their
    mean."""
    assert data.clip is not None
    sides = [("Keys", data.clip.k, K_SIDE.light), ("Values", data.clip.v, V_SIDE.light)]
    present = [(name, curve, colour) for name, curve, colour in sides if curve is not None]
    panels = figure.subplots(1, len(present), sharey=True, squeeze=False)[0]
    for axes, (name, curve, colour) in zip(panels, present, strict=True):
        axes.set_title(f"{name}: {text.plain(curve.error)} error")
        _clip_panel(axes, curve, colour)
    panels[0].set_ylabel("error against no clipping")
    lines = [line for _, curve, _ in present for line in _against_last(curve)]
    low, high = min(map(min, lines)), max(map(max, lines))
    margin = max(0.06 * (high - low), 0.002)
    panels[0].set_ylim(low - margin, high + margin)
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: text.tick(value)))


def _clip_panel(axes: Axes, curve: ClipChart, colour: str) -> None:
    *layers, mean = _against_last(curve)
    for layer in layers:
        axes.plot(curve.ratios, layer, color=FAINT.light, linewidth=0.8, alpha=0.7)
    axes.axhline(0, color=MUTED.light, linewidth=0.8)
    axes.plot(curve.ratios, mean, color=colour, linewidth=2.4)
    if curve.chosen is not None:
        ratio = min(curve.ratios, key=lambda value: abs(value - (curve.chosen or 1.0)))
        value = mean[curve.ratios.index(ratio)]
        axes.plot([ratio], [value], "o", color=colour, markersize=7)
        label, paper = (
            f"served: {text.clip(curve.chosen)}",
            {"facecolor": PAGE.light, "alpha": 0.85, "linewidth": 0},
        )
        axes.annotate(
            label, (ratio, value), (0, -9), textcoords="offset points", ha="center", va="top",
            color=colour, weight="bold", bbox=paper | {"pad": 1},
        )  # fmt: skip
    axes.xaxis.set_major_locator(FixedLocator(list(curve.ratios)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda ratio, _: "none" if ratio >= 1 else f"{ratio:.3g}")
    )
    axes.set_xlabel("clip ratio")


def _against_last(curve: ClipChart) -> list[list[float]]:
    """Change in percent against the largest ratio, for every layer, then for the mean."""
    lines = [*curve.layers, curve.mean]
    return [[100 * (value / line[-1] - 1) if line[-1] else 0.0 for value in line] for line in lines]


def draw_spectra(figure: FigureBase, data: ReportData) -> None:
    """Eigenvalue shares of both targets, one line per layer, coloured by depth."""
    assert data.spectra is not None
    left, right = figure.subplots(1, 2, sharey=True)
    sides = ((left, "Keys", data.spectra.k), (right, "Values", data.spectra.v))
    lowest = min(_floor(spectrum) for _, _, spectrum in sides)
    for axes, name, spectrum in sides:
        _spectrum_panel(axes, spectrum)
        axes.set_title(f"{name}: {text.target(spectrum.target)}")
    left.set_ylim(lowest / 1.5, 1.4)
    left.set_ylabel("share of the total")
    _depth_key(left, data.layers)


def _spectrum_panel(axes: Axes, spectrum: Spectrum) -> None:
    for layer, colour in zip(spectrum.layers, _depth(len(spectrum.layers)), strict=True):
        axes.plot(spectrum.ranks, positive(layer), color=colour, linewidth=1.1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(1, max(spectrum.dim, 2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text.share(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("eigenvalue, largest first")
    flat = 1 / spectrum.dim
    axes.axhline(flat, color=INK.light, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate("flat", (1, flat), (4, 2), textcoords="offset points", va="bottom", weight="bold")


def _depth(count: int) -> list[str]:
    """Colours of `count` layers; neighbours share one where there are more layers than colours."""
    ramp = depth_colours()
    return [
        ramp[round(position / max(count - 1, 1) * (DEPTH_STEPS - 1))].light
        for position in range(count)
    ]


def _floor(spectrum: Spectrum) -> float:
    """The lowest share worth showing: what lies 1e-9 below the total is rounding."""
    shown = [share for layer in spectrum.layers for share in layer if share > 1e-9]
    return min(shown, default=1 / spectrum.dim)


def _depth_key(axes: Axes, layers: Sequence[int]) -> None:
    """A strip of the depth colours in the lower left corner, with the first and the last layer."""
    colours = _depth(min(len(layers), DEPTH_STEPS))
    inset = axes.inset_axes((0.13, 0.1, 0.2, 0.035))
    inset.set_axis_off()
    for step, colour in enumerate(colours):
        inset.axvspan(step, step + 1, color=colour, linewidth=0)
    inset.set_xlim(0, len(colours))
    inset.text(
        -0.03,
        0.5,
        f"layer {layers[0]}",
        transform=inset.transAxes,
        ha="right",
        va="center",
        fontsize=8,
    )
    inset.text(
        1.03, 0.5, f"{layers[-1]}", transform=inset.transAxes, ha="left", va="center", fontsize=8
    )
