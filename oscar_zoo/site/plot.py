"""Axes and lines of a chart as inline SVG.

Colours and fonts come from the page's style, so charts follow its light and dark schemes. A chart
has a title and a sentence for screen readers, and needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from oscar_zoo.site.html import Html, element

WIDTH, HEIGHT = 360, 228
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 40
_LETTER = 6.0
"""Width of a letter of a label, at most."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        low, high: values at its ends.
        label: what it shows.
        log: whether it is logarithmic; both ends are positive then.
        ticks: values with a label; by default round ones.
        text: writes a value.
    """

    low: float
    high: float
    label: str
    log: bool = False
    ticks: tuple[float, ...] | None = None
    text: Callable[[float], str] = lambda value: f"{value:g}"

    def share(self, value: float) -> float:
        """Where `value` stands, 0 to 1."""
        low, span = self._range
        at = min(max(value, self.low), self.high)
        return ((math.log10(at) if self.log else at) - low) / span

    @cached_property
    def _range(self) -> tuple[float, float]:
        """The low end and the distance to the high end, in logarithms on a log axis."""
        ends = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        return ends[0], (ends[1] - ends[0]) or 1.0

    def marks(self) -> tuple[float, ...]:
        """The values with a label."""
        if self.ticks is not None:
            return self.ticks
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            if last - first < 2:
                return tuple(_within_decades(self.low, self.high))
            step = max(1, math.ceil((last - first) / 5))
            return tuple(10.0**power for power in range(first, last + 1, step))
        return tuple(_round_values(self.low, self.high))


def chart(title: str, said: str, x: Axis, y: Axis, shapes: Iterable[Html | None]) -> Html:
    """A chart.

    Args:
        shapes: what `line`, `band` and others made.
    """
    return element(
        "svg",
        element("title", f"{title}. {said}"),
        element("g", _grid(x, y), class_="grid"),
        element("g", list(shapes)),
        element(
            "text",
            x.label,
            x=(LEFT + WIDTH - RIGHT) / 2,
            y=HEIGHT - 5,
            text_anchor="middle",
            class_="axis",
        ),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}. {said}",
        class_="chart",
    )


def line(points: Points, x: Axis, y: Axis, css: str) -> Html:
    """A line through points in the units of the axes."""
    return element("path", d="M" + "L".join(_at(x, y, *point) for point in points), class_=css)


def band(low: Points, high: Points, x: Axis, y: Axis, css: str) -> Html:
    """The area between two lines."""
    there = [_at(x, y, *point) for point in low]
    back = [_at(x, y, *point) for point in reversed(high)]
    return element("path", d=f"M{'L'.join([*there, *back])}Z", class_=css)


def vertical(value: float, x: Axis, css: str, label: str | None = None) -> Html:
    """A line up from a value of the x axis, with a word beside it."""
    at = _x(x, value)
    left = at > WIDTH * 0.75
    return element(
        "g",
        element("path", d=f"M{at:.1f} {TOP}V{HEIGHT - BOTTOM}", class_=css),
        element(
            "text",
            label,
            x=f"{at + (-5 if left else 5):.1f}",
            y=TOP + 10,
            text_anchor="end" if left else "start",
            class_="note",
        )
        if label
        else None,
    )


def dot(
    point: tuple[float, float],
    x: Axis,
    y: Axis,
    css: str,
    error: float | None = None,
    *,
    aside: float = 0.0,
) -> Html:
    """A point, with its error up and down; `aside` moves it to the right, off another one."""
    across, up = _x(x, point[0]) + aside, _y(y, point[1])
    bar = None
    if error:
        top, bottom = _y(y, point[1] + error), _y(y, point[1] - error)
        bar = element("path", d=f"M{across:.1f} {top:.1f}V{bottom:.1f}", class_=f"{css} error")
    return element(
        "g", bar, element("circle", cx=f"{across:.1f}", cy=f"{up:.1f}", r=3.5, class_=css)
    )


def _grid(x: Axis, y: Axis) -> list[Html]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in y.marks():
        up = _y(y, value)
        parts.append(element("path", d=f"M{LEFT} {up:.1f}H{right}"))
        parts.append(
            element("text", y.text(value), x=LEFT - 6, y=f"{up + 3.5:.1f}", text_anchor="end")
        )
    for value in x.marks():
        across = _x(x, value)
        parts.append(element("path", d=f"M{across:.1f} {bottom}v4"))
        parts.append(_label(x.text(value), across, bottom + 16))
    parts.append(element("path", d=f"M{LEFT} {bottom}H{right}", class_="base"))
    return parts


def _label(text: str, across: float, y: float) -> Html:
    """A label below `across`; one that would leave the chart ends or begins at its edge."""
    half = _LETTER * len(text) / 2
    at, anchor = across, "middle"
    if across + half > WIDTH:
        at, anchor = WIDTH - 1.0, "end"
    elif across - half < 0:
        at, anchor = 1.0, "start"
    return element("text", text, x=f"{at:.1f}", y=y, text_anchor=anchor)


def _at(x: Axis, y: Axis, across: float, up: float) -> str:
    return f"{_x(x, across):.1f} {_y(y, up):.1f}"


def _x(axis: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * axis.share(value)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * axis.share(value)


def _round_values(low: float, high: float) -> list[float]:
    """About five round values from `low` to `high`."""
    rough = (high - low) / 4 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    values = []
    while (value := first * step) <= high + step * 1e-9:
        values.append(round(value, 12))
        first += 1
    return values


def _within_decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten from `low` to `high`."""
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    every = (10.0**power * factor for power in range(first, last + 1) for factor in (1, 2, 5))
    return [value for value in every if low <= value <= high]
