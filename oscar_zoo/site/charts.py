"""The charts of an artifact: spectra, clip curves, errors by layer, and scores over time.

Layers are shown as a range, its middle half and its middle: a model may have a hundred of them, and
single lines say less than where most of them are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from statistics import median, quantiles

from oscar_zoo.artifact.specs import Score
from oscar_zoo.compute.report.data import ClipChart, Spectrum
from oscar_zoo.site import plot
from oscar_zoo.site.html import Html, element
from oscar_zoo.site.plot import Axis

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SMALLEST = 1e-7
"""Shares of a spectrum below this are rounding errors of 32-bit numbers."""


@dataclass(frozen=True)
class Pair:
    """A score and what it is compared with."""

    before: Score
    after: Score


def pair_chart(pair: Pair, scale: tuple[float, float]) -> Html:
    """Both values on one line, BF16 hollow and INT2 filled, with the standard errors that are
    known. The numbers beside it say the same, so screen readers pass over it."""
    low, high = scale
    width = 96

    def place(value: float) -> float:
        return 4 + (width - 8) * (value - low) / ((high - low) or 1.0)

    parts = [element("path", d=f"M0 8H{width}", class_="base")]
    for score, css in ((pair.before, "bf16"), (pair.after, "int2")):
        if score.value is None:
            continue
        if score.stderr:
            start, end = place(score.value - score.stderr), place(score.value + score.stderr)
            parts.append(element("path", d=f"M{start:.1f} 8H{end:.1f}", class_=f"{css} error"))
        at = place(score.value)
        parts.append(element("circle", cx=f"{at:.1f}", cy=8, r=3.2, class_=css))
    return element(
        "svg", parts, viewBox=f"0 0 {width} 16", width=width, height=16, aria_hidden="true",
        class_="pair",
    )  # fmt: skip


def spectrum_chart(name: str, spectrum: Spectrum) -> Html:
    """Shares of the eigenvalues by rank, on log axes."""
    ranks = [float(rank) for rank in spectrum.ranks]
    columns = [[max(layer[at], _SMALLEST) for layer in spectrum.layers] for at in range(len(ranks))]
    largest = max(max(column) for column in columns)
    lowest = max(_SMALLEST, min(min(column) for column in columns))
    x = Axis(
        1.0, max(2.0, float(spectrum.dim)), "rank", log=True, ticks=_powers_of_four(spectrum.dim)
    )
    y = Axis(lowest, max(largest, lowest * 10), "", log=True, text=_power)
    top = median(columns[0])
    said = (
        f"{len(spectrum.layers)} layers of {spectrum.dim} eigenvalues; the largest has"
        f" {100 * top:.1f} percent of the sum in the middle layer"
    )
    shapes = [*_ranges(ranks, columns, x, y, "k" if name.startswith("K") else "v")]
    return plot.chart(f"Spectrum of {name}", said, x, y, shapes)


def clip_chart(name: str, chart: ClipChart) -> Html:
    """Error against the clip ratio, as a part of the error without clipping."""
    ratios, side = list(chart.ratios), "k" if name.startswith("K") else "v"
    layers = [_relative(layer) for layer in chart.layers]
    mean = _relative(chart.mean)
    columns = [[layer[at] for layer in layers] for at in range(len(ratios))]
    x = Axis(ratios[0], ratios[-1], "clip ratio; 1 clips nothing")
    y = _linear([value for layer in (*layers, mean) for value in layer])
    best = min(range(len(mean)), key=mean.__getitem__)
    said = f"The mean is least at {ratios[best]:g}" + (
        f"; {chart.chosen:g} is served" if chart.chosen is not None else ""
    )
    shapes = list(_ranges(ratios, columns, x, y, side)) if layers else []
    shapes.append(plot.line(list(zip(ratios, mean, strict=True)), x, y, f"{side} mean"))
    if chart.chosen is not None:
        shapes.append(plot.vertical(chart.chosen, x, "chosen", f"served: {chart.chosen:g}"))
    return plot.chart(f"Clip of {name}: {chart.error} error", said, x, y, shapes)


def _relative(errors: Sequence[float]) -> list[float]:
    """Each error as a part of the last one, which is that of the largest ratio."""
    return [error / errors[-1] for error in errors] if errors[-1] > 0 else list(errors)


def layers_chart(layers: Sequence[int], errors: Sequence[float]) -> Html:
    """Relative squared error of the attention output, layer by layer."""
    points = [(float(layer), value) for layer, value in zip(layers, errors, strict=True)]
    x = Axis(float(layers[0]), float(max(layers[-1], layers[0] + 1)), "layer")
    y = _linear([0.0, *errors])
    worst = max(range(len(errors)), key=errors.__getitem__)
    said = f"The worst layer is {layers[worst]} with {errors[worst]:.3g}"
    shapes = [plot.line(points, x, y, "int2"), *(plot.dot(p, x, y, "int2 small") for p in points)]
    return plot.chart("Error of the attention output", said, x, y, shapes)


def history_chart(scores: Sequence[Score]) -> Html | None:
    """Dated values of one task over time; `None` with less than two of them."""
    dated = sorted(
        (day, value, error, kind) for score in scores for day, value, error, kind in _dated(score)
    )
    if len({day for day, *_ in dated}) < 2:
        return None
    values = [value + sign * error for _, value, error, _ in dated for sign in (-1, 1)]
    x = Axis(
        float(dated[0][0]), float(dated[-1][0]), "date",
        ticks=tuple(sorted({float(dated[0][0]), float(dated[-1][0])})), text=_day,
    )  # fmt: skip
    y = _linear(values)
    shapes: list[Html] = []
    for kind in ("bf16", "int2"):
        own = [(float(day), value, error) for day, value, error, said in dated if said == kind]
        if len(own) > 1:
            shapes.append(plot.line([(day, value) for day, value, _ in own], x, y, kind))
        aside = 5.0 if kind == "bf16" else 0.0
        shapes += [plot.dot((d, v), x, y, kind, error, aside=aside) for d, v, error in own]
    said = f"{len(dated)} values from {_day(dated[0][0])} to {_day(dated[-1][0])}"
    return plot.chart(f"{scores[0].task} over time", said, x, y, shapes)


def _dated(score: Score) -> list[tuple[int, float, float, str]]:
    found: list[tuple[int, float, float, str]] = []
    for one in (score, *([score.baseline] if score.baseline else [])):
        entries = [(one.date, one.value, one.stderr or 0.0)]
        entries += [(old.date, old.value, 0.0) for old in one.history]
        for when, value, error in entries:
            day = _ordinal(when)
            if day is not None and value is not None:
                found.append((day, value, error, one.kv_dtype))
    return found


def _ordinal(text: str | None) -> int | None:
    try:
        return date.fromisoformat((text or "")[:10]).toordinal()
    except ValueError:
        return None


def _day(ordinal: float) -> str:
    return date.fromordinal(int(ordinal)).isoformat()


def _ranges(
    across: Sequence[float], columns: Sequence[Sequence[float]], x: Axis, y: Axis, side: str
) -> list[Html]:
    """All layers, their middle half, and their median."""
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    parts = [_band(across, low, high, x, y, f"{side} all")]
    if len(columns[0]) >= 4:
        cut = [quantiles(column, n=4) for column in columns]
        parts.append(_band(across, [q[0] for q in cut], [q[2] for q in cut], x, y, f"{side} half"))
    middle = [median(column) for column in columns]
    return [*parts, plot.line(list(zip(across, middle, strict=True)), x, y, f"{side} middle")]


def _band(
    across: Sequence[float], low: Sequence[float], high: Sequence[float], x: Axis, y: Axis, css: str
) -> Html:
    return plot.band(
        list(zip(across, low, strict=True)), list(zip(across, high, strict=True)), x, y, css
    )


def _linear(values: Sequence[float]) -> Axis:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Axis(max(0.0, low - room) if low >= 0 else low - room, high + room, "")


def _powers_of_four(dim: int) -> tuple[float, ...]:
    ticks = [1.0]
    while ticks[-1] * 4 <= dim:
        ticks.append(ticks[-1] * 4)
    return tuple(ticks)


def _power(value: float) -> str:
    """A power of ten as percent."""
    percent = 100 * value
    if percent >= 0.001:
        return f"{percent:g} %"
    return f"10{str(round(math.log10(percent))).translate(_RAISED)} %"
