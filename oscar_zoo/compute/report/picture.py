"""The whole report as one PNG, for places that show pictures only: the table on top, the charts of
the page below.

Every part is drawn as a figure of its own and pasted, so a chart looks as it does on the page.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from numpy.typing import NDArray

from oscar_zoo.compute.report import text
from oscar_zoo.compute.report.axes import weight
from oscar_zoo.compute.report.charts import HALF_WIDTH, PAGE_WIDTH, Chart, arrange, charts_of
from oscar_zoo.compute.report.data import ReportData
from oscar_zoo.compute.report.style import BAD, GOOD, INK, MUTED, PAGE, RULE, SOFT, WARN, drawing

Pixels = NDArray[np.uint8]

DPI = 150
_MARGIN = 0.35
"""Inches around everything."""
_LINE = 0.2
"""Inches of a line of text."""
_ROW = 0.26
"""Inches of a row of the table."""
_COLUMNS = 138
"""Characters of 9 points that fit into the width."""
_CHARACTER = 0.079
"""Inches of a character of 9 points, generously."""
_VERDICTS = {"pass": GOOD.light, "warn": WARN.light, "fail": BAD.light}


def picture(data: ReportData) -> bytes:
    """The PNG, about 1600 pixels wide."""
    with drawing():
        rows = [_head(data), *(_row(row, data) for row in arrange(charts_of(data)))]
        margin = round(_MARGIN * DPI)
        image = np.pad(
            np.concatenate(rows), ((margin, margin), (margin, margin), (0, 0)), constant_values=255
        )
        stream = io.BytesIO()
        imsave(stream, image, format="png", dpi=DPI, metadata={"Software": "oscar-zoo"})
    return stream.getvalue()


def _row(charts: Sequence[Chart], data: ReportData) -> Pixels:
    """One or two charts side by side, each below its title and caption."""
    width = HALF_WIDTH if len(charts) == 2 else PAGE_WIDTH
    height = max(chart.height for chart in charts)
    captions = [
        textwrap.wrap(chart.caption, round(_COLUMNS * width / PAGE_WIDTH)) for chart in charts
    ]
    above = 0.5 + _LINE * max(map(len, captions))
    parts = []
    for chart, caption in zip(charts, captions, strict=True):
        figure = Figure(figsize=(width, above + height), facecolor=PAGE.light, layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=[above, height])
        text, body = halves
        text.text(0, 1 - 0.33 / above, chart.title, fontsize=11, weight="bold")
        for index, line in enumerate(caption):
            text.text(0, 1 - (0.36 + _LINE * (index + 0.9)) / above, line, color=MUTED.light)
        chart.draw(body, data)
        parts.append(_pixels(figure))
    if len(parts) == 2:
        gap = round(PAGE_WIDTH * DPI) - sum(part.shape[1] for part in parts)
        parts.insert(1, np.full((parts[0].shape[0], gap, 3), 255, dtype=np.uint8))
    return np.concatenate(parts, axis=1)


def _head(data: ReportData) -> Pixels:
    """Title, answer, table, facts, notes."""
    kept, rest = text.answer(data)
    reason = data.comparison.reason if data.comparison else None
    facts = "  ·  ".join(
        f"{text.plain(fact.label)}: {text.plain(fact.value)}" for fact in data.facts
    )
    answer = textwrap.wrap(kept + rest, 110)
    why = textwrap.wrap(text.sentence(reason), _COLUMNS) if reason else []
    small = [(line, MUTED.light) for line in textwrap.wrap(facts, _COLUMNS)]
    small += [
        (line, WARN.light)
        for note in data.notes
        for line in textwrap.wrap(text.plain(note), _COLUMNS)
    ]
    table = text.table(data.comparison) if data.comparison else None
    y = 0.85 + 0.25 * len(answer) + _LINE * len(why)
    below = y + (_ROW * (len(table.rows) + 1) + 0.2 if table else 0)
    figure, axes = _sheet(below + _LINE * len(small) + 0.2)
    axes.text(0, 0.14, "oscar-zoo report", color=MUTED.light)
    axes.text(
        0,
        0.45,
        textwrap.shorten(text.plain(data.title), 80, placeholder=" …"),
        fontsize=15,
        weight="bold",
    )
    for index, line in enumerate(answer):
        axes.text(0, 0.82 + 0.25 * index, line, fontsize=11)
    for index, line in enumerate(why):
        axes.text(0, 0.8 + 0.25 * len(answer) + _LINE * index, line, color=MUTED.light)
    if table is not None:
        _draw_table(axes, table, y)
    for index, (line, colour) in enumerate(small):
        axes.text(0, below + _LINE * (index + 0.6), line, color=colour)
    return _pixels(figure)


def _draw_table(axes: Axes, table: text.Table, y: float) -> None:
    """Columns as wide as their texts, numbers to the right; the kept row on a ground of its own and
    marked in words."""
    lines = [table.heads, *(row.cells for row in table.rows)]
    widths = [max(map(len, column)) * _CHARACTER for column in zip(*lines, strict=True)]
    edges = [sum(widths[: index + 1]) + 0.26 * index for index in range(len(widths))]
    end = edges[-1] + 0.75
    for number, cells in enumerate(lines):
        row = table.rows[number - 1] if number else None
        middle = y + _ROW * (number + 0.5)
        kept = row is not None and row.kept
        if kept:
            axes.axhspan(
                middle - _ROW / 2,
                middle + _ROW / 2,
                0,
                end / PAGE_WIDTH,
                color=SOFT.light,
                zorder=0,
            )
            axes.text(edges[-1] + 0.15, middle, f"← {text.KEPT}", va="center", weight="bold")
        for index, cell in enumerate(cells):
            x, side = (0.06, "left") if index == 0 else (edges[index], "right")
            axes.text(
                x, middle, cell, ha=side, va="center", weight=weight(kept), color=_colour(cell, row)
            )
        axes.plot(
            [0, end],
            [middle + _ROW / 2] * 2,
            color=RULE.light,
            linewidth=1.2 if row is None else 0.6,
        )


def _colour(cell: str, row: text.TableRow | None) -> str:
    if row is None or cell in (text.NOT_MEASURED, text.NOT_APPLICABLE):
        return MUTED.light
    return _VERDICTS[cell] if cell == row.gate else INK.light


def _sheet(height: float) -> tuple[Figure, Axes]:
    """A figure as wide as the page whose coordinates are inches from its upper left corner."""
    figure = Figure(figsize=(PAGE_WIDTH, height), facecolor=PAGE.light)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_autoscale_on(False)
    axes.set_xlim(0, PAGE_WIDTH)
    axes.set_ylim(height, 0)
    return figure, axes


def _pixels(figure: Figure) -> Pixels:
    figure.set_dpi(DPI)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
