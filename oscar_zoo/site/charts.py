"""The charts of an artifact as inline SVG: spectra, clip curves, errors by layer, scores over time.

Layers, of which a model may have a hundred, are shown as a range, its middle half and its middle.
Colours and fonts come from the page's style, so charts follow its light and dark schemes and its
policy. Each has a sentence for screen readers. Names, notes and scores come from manifests that
anybody may have written: `tag` escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import median, quantiles
from typing import Any

from markupsafe import Markup

from oscar_zoo.artifact.specs import Score
from oscar_zoo.compute.report.data import ClipChart, Spectrum

WIDTH, HEIGHT = 360, 228
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 40
_LETTER = 6.0
"""Width of a letter of a label, at most."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SMALLEST = 1e-7
"""Shares of a spectrum below this are rounding errors of 32-bit numbers."""

Points = Sequence[tuple[float, float]]


def pair_chart(score: Score, scale: tuple[float, float] | None) -> Markup | None:
    """A score and its baseline on one line, BF16 hollow and INT2 filled, with the standard errors
    that are known. The numbers beside it say the same, so screen readers pass over it."""
    before = score.baseline
    if scale is None or before is None or before.value is None:
        return None
    axis, width, parts = Axis(*scale), 96, [_path("M0 8H96", "base")]

    def place(value: float) -> float:
        return 4 + (width - 8) * axis.share(value)

    for one, css in ((before, "bf16"), (score, "int2")):
        if one.value is None:
            continue
        if one.stderr:
            start, end = place(one.value - one.stderr), place(one.value + one.stderr)
            parts.append(_path(f"M{start:.1f} 8H{end:.1f}", f"{css} error"))
        parts.append(tag("circle", cx=f"{place(one.value):.1f}", cy="8", r="3.2", class_=css))
    size = {"viewBox": f"0 0 {width} 16", "width": width, "height": 16}
    return tag("svg", *parts, **size, aria_hidden="true", class_="pair") + "\n"


def spectrum_chart(name: str, spectrum: Spectrum) -> Markup:
    """Shares of the eigenvalues by rank, on log axes."""
    ranks = [float(rank) for rank in spectrum.ranks]
    columns = [[max(layer[at], _SMALLEST) for layer in spectrum.layers] for at in range(len(ranks))]
    largest = max(max(column) for column in columns)
    lowest = max(_SMALLEST, min(min(column) for column in columns))
    fours = [4.0**power for power in range(32) if 4**power <= spectrum.dim]
    x = Axis(1.0, max(2.0, float(spectrum.dim)), "rank", log=True, ticks=fours)
    chart = Chart(x, Axis(lowest, max(largest, lowest * 10), log=True, text=_power))
    chart.ranges(ranks, columns, _side(name))
    return chart.svg(
        f"Spectrum of {name}. {len(spectrum.layers)} layers of {spectrum.dim} eigenvalues; the"
        f" largest has {100 * median(columns[0]):.1f} percent of the sum in the middle layer"
    )


def clip_chart(name: str, clip: ClipChart) -> Markup:
    """Error against the clip ratio, as a part of the error without clipping."""
    ratios, mean = list(clip.ratios), _relative(clip.mean)
    layers = [_relative(layer) for layer in clip.layers]
    x = Axis(ratios[0], ratios[-1], "clip ratio; 1 clips nothing")
    chart = Chart(x, _linear([value for layer in (*layers, mean) for value in layer]))
    if layers:
        columns = [[layer[at] for layer in layers] for at in range(len(ratios))]
        chart.ranges(ratios, columns, _side(name))
    chart.line(list(zip(ratios, mean, strict=True)), f"{_side(name)} mean")
    said = f"The mean is least at {ratios[min(range(len(mean)), key=mean.__getitem__)]:g}"
    if clip.chosen is not None:
        chart.upright(clip.chosen, f"served: {clip.chosen:g}")
        said += f"; {clip.chosen:g} is served"
    return chart.svg(f"Clip of {name}: {clip.error} error. {said}")


def layers_chart(layers: Sequence[int], errors: Sequence[float]) -> Markup:
    points = [(float(layer), value) for layer, value in zip(layers, errors, strict=True)]
    x = Axis(float(layers[0]), float(max(layers[-1], layers[0] + 1)), "layer")
    chart = Chart(x, _linear([0.0, *errors]))
    chart.line(points, "int2")
    for point in points:
        chart.dot(point, "int2 small")
    worst = max(range(len(errors)), key=errors.__getitem__)
    said = f"The worst layer is {layers[worst]} with {errors[worst]:.3g}"
    return chart.svg(f"Error of the attention output. {said}")


def history_chart(score: Score) -> Markup | None:
    """Dated values of one task over time; `None` with less than two days."""
    dated = sorted(_dated(score))
    first, last = (dated[0][0], dated[-1][0]) if dated else (0, 0)
    if first == last:
        return None
    x = Axis(float(first), float(last), "date", ticks=(float(first), float(last)), text=_day)
    chart = Chart(x, _linear([value + sign * e for _, value, e, _ in dated for sign in (-1, 1)]))
    for kind, aside in (("bf16", 5.0), ("int2", 0.0)):
        own = [(float(day), value, error) for day, value, error, said in dated if said == kind]
        if len(own) > 1:
            chart.line([(day, value) for day, value, _ in own], kind)
        for day, value, error in own:
            chart.dot((day, value), kind, error, aside=aside)
    said = f"{len(dated)} values from {_day(first)} to {_day(last)}"
    return chart.svg(f"{score.task} over time. {said}")


@dataclass(frozen=True)
class Axis:
    """One axis from `low` to `high`, both positive where it is logarithmic. `ticks` have a label,
    by default round values; `text` writes a value."""

    low: float
    high: float
    label: str = ""
    log: bool = False
    ticks: Sequence[float] | None = None
    text: Callable[[float], str] = "{:g}".format

    def share(self, value: float) -> float:
        """Where `value` stands, 0 to 1."""
        at, low, high = min(max(value, self.low), self.high), self.low, self.high
        if self.log:
            at, low, high = map(math.log10, (at, low, high))
        return (at - low) / ((high - low) or 1.0)

    def marks(self) -> Sequence[float]:
        if self.ticks is not None:
            return self.ticks
        if not self.log:
            return list(_round_values(self.low, self.high))
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        if last - first >= 2:
            step = max(1, math.ceil((last - first) / 5))
            return [10.0**power for power in range(first, last + 1, step)]
        every = (10.0**p * factor for p in range(first - 1, last + 1) for factor in (1, 2, 5))
        return [value for value in every if self.low <= value <= self.high]


class Chart:
    """Lines and points between two axes; what is drawn last is above."""

    def __init__(self, x: Axis, y: Axis) -> None:
        self._x, self._y = x, y
        self._shapes: list[Markup] = []

    def line(self, points: Points, css: str) -> None:
        self._shapes.append(_path("M" + "L".join(map(self._at, points)), css))

    def ranges(
        self, across: Sequence[float], columns: Sequence[Sequence[float]], side: str
    ) -> None:
        """All layers, their middle half, and their median."""
        self._band(across, [(min(c), max(c)) for c in columns], f"{side} all")
        if len(columns[0]) >= 4:
            cut = [quantiles(column, n=4) for column in columns]
            self._band(across, [(q[0], q[2]) for q in cut], f"{side} half")
        self.line(list(zip(across, map(median, columns), strict=True)), f"{side} middle")

    def _band(self, across: Sequence[float], ends: Sequence[tuple[float, float]], css: str) -> None:
        low, high = ([*zip(across, side, strict=True)] for side in zip(*ends, strict=True))
        self._shapes.append(_path(f"M{'L'.join(map(self._at, [*low, *reversed(high)]))}Z", css))

    def upright(self, value: float, label: str) -> None:
        """A line up from a value of the x axis, with a word beside it."""
        at = self._across(value)
        left = at > WIDTH * 0.75
        beside, anchor = (at - 5, "end") if left else (at + 5, "start")
        line = _path(f"M{at:.1f} {TOP}V{HEIGHT - BOTTOM}", "chosen")
        self._shapes.append(tag("g", line, _text(label, beside, TOP + 10, anchor, "note")))

    def dot(
        self, point: tuple[float, float], css: str, error: float = 0.0, *, aside: float = 0.0
    ) -> None:
        """A point, with its error up and down; `aside` moves it to the right, off another one."""
        across, parts = self._across(point[0]) + aside, []
        if error:
            top, bottom = self._up(point[1] + error), self._up(point[1] - error)
            parts.append(_path(f"M{across:.1f} {top:.1f}V{bottom:.1f}", f"{css} error"))
        place = {"cx": f"{across:.1f}", "cy": f"{self._up(point[1]):.1f}"}
        self._shapes.append(tag("g", *parts, tag("circle", **place, r="3.5", class_=css)))

    def svg(self, said: str) -> Markup:
        """The chart, of which `said` is the title and a sentence."""
        label = _text(self._x.label, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "middle", "axis")
        parts = tag("g", *self._grid(), class_="grid"), tag("g", *self._shapes), label
        named = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria_label": said}
        return tag("svg", tag("title", said), *parts, **named, class_="chart") + "\n"

    def _grid(self) -> Iterator[Markup]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for value in self._y.marks():
            up = self._up(value)
            yield _path(f"M{LEFT} {up:.1f}H{right}")
            yield _text(self._y.text(value), LEFT - 6, up + 3.5, "end")
        for value in self._x.marks():
            at, text = self._across(value), self._x.text(value)
            yield _path(f"M{at:.1f} {bottom}v4")
            half, anchor = _LETTER * len(text) / 2, "middle"
            if at + half > WIDTH:  # a label that would leave the chart ends at its edge
                at, anchor = WIDTH - 1.0, "end"
            elif at - half < 0:
                at, anchor = 1.0, "start"
            yield _text(text, at, bottom + 16, anchor)
        yield _path(f"M{LEFT} {bottom}H{right}", "base")

    def _at(self, point: tuple[float, float]) -> str:
        return f"{self._across(point[0]):.1f} {self._up(point[1]):.1f}"

    def _across(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * self._x.share(value)

    def _up(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self._y.share(value)


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element of markup; what is text, in it or in an attribute, is escaped."""
    given = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()]
    written = [Markup(' {}="{}"').format(key, shown(value)) for key, value in given if value != ""]
    parts = Markup("").join(map(shown, inside)), Markup("").join(written)
    return Markup("<{0}{2}>{1}</{0}>").format(name, *parts)


def shown(value: object) -> Any:
    """A value before it is escaped: text without characters that are not seen, such as those that
    turn a line around. Markup stays."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(" " if c.isspace() else c for c in value if c.isspace() or c.isprintable())


def _path(d: str, css: str = "") -> Markup:
    return tag("path", d=d, class_=css)


def _text(text: str, x: float, y: float, anchor: str, css: str = "") -> Markup:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text_anchor": anchor}
    return tag("text", text, **place, class_=css)


def _side(name: str) -> str:
    return "k" if name.startswith("K") else "v"


def _relative(errors: Sequence[float]) -> list[float]:
    return [error / errors[-1] for error in errors] if errors[-1] > 0 else list(errors)


def _dated(score: Score) -> Iterator[tuple[int, float, float, str]]:
    for one in filter(None, (score, score.baseline)):
        entries = [(one.date, one.value, one.stderr or 0.0)]
        entries += [(old.date, old.value, 0.0) for old in one.history]
        for when, value, error in entries:
            try:
                day = date.fromisoformat((when or "")[:10]).toordinal()
            except ValueError:
                continue
            if value is not None:
                yield day, value, error, one.kv_dtype


def _day(ordinal: float) -> str:
    return date.fromordinal(int(ordinal)).isoformat()


def _linear(values: Sequence[float]) -> Axis:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Axis(max(0.0, low - room) if low >= 0 else low - room, high + room)


def _power(value: float) -> str:
    """A power of ten as percent."""
    percent = 100 * value
    if percent >= 0.001:
        return f"{percent:g} %"
    return f"10{str(round(math.log10(percent))).translate(_RAISED)} %"


def _round_values(low: float, high: float) -> Iterator[float]:
    """About five round values from `low` to `high`."""
    rough = (high - low) / 4 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    while (value := first * step) <= high + step * 1e-9:
        yield round(value, 12)
        first += 1
