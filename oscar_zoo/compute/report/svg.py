"""A chart as inline SVG: no background, no date, no font of its own, colours by the names of CSS
variables.

The same data gives the same bytes with one version of matplotlib. Ids carry the chart's key, so
that several charts can stand in one page.
"""

from __future__ import annotations

import io
import re
from html import escape

from matplotlib import rc_context
from matplotlib.figure import Figure

from oscar_zoo.compute.report.charts import HALF_WIDTH, PAGE_WIDTH, Chart
from oscar_zoo.compute.report.data import ReportData
from oscar_zoo.compute.report.style import colour_variables, drawing

_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def chart_svg(chart: Chart, data: ReportData, *, half: bool) -> str:
    """One chart as an `<svg>` element to stand in HTML.

    Args:
        chart: one of `charts_of(data)`.
        half: whether it gets half of the page's width.
    """
    stream = io.StringIO()
    with drawing(), rc_context({"svg.hashsalt": chart.key}):
        figure = Figure(
            figsize=(HALF_WIDTH if half else PAGE_WIDTH, chart.height), layout="constrained"
        )
        chart.draw(figure, data)
        figure.savefig(stream, format="svg", metadata=_NO_METADATA)
        variables = colour_variables(data.methods)
    text = stream.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", lambda tag: _tag(tag[0], chart.key), text)
    for name, colour in variables.items():
        text = text.replace(f": {colour.light}", f": var(--{name}, {colour.light})")
    label = escape(f"{chart.title}. {chart.caption}")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _tag(tag: str, key: str) -> str:
    """A tag with ids of this chart's own, coordinates to a hundredth of a point, and the page's
    font."""
    tag = re.sub(r' (id="|xlink:href="#|clip-path="url\(#)', rf" \1{key}-", tag)
    tag = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), tag)
    return tag.replace("'DejaVu Sans'", "var(--font)")
