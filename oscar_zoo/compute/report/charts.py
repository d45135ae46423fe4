"""The charts of a report: what each shows, what to look for in it, and how they share the page.

Lines are labelled where they end instead of in a legend. All text that came from outside is plain
text: matplotlib's formula mode is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import FigureBase

from oscar_zoo.compute.report import draw_layers, draw_methods
from oscar_zoo.compute.report.data import ReportData

PAGE_WIDTH = 10.0
"""Inches of a chart as wide as the page."""
HALF_WIDTH = 4.8
"""Inches of one that shares its row."""


@dataclass(frozen=True)
class Chart:
    """One chart of a report.

    Attributes:
        key: short name, for ids.
        title: what is shown.
        caption: one sentence that says what to look for.
        half: whether half of the page is wide enough.
        height: in inches.
        draw: into an empty figure or subfigure.
    """

    key: str
    title: str
    caption: str
    half: bool
    height: float
    draw: Callable[[FigureBase, ReportData], None]


def charts_of(data: ReportData) -> tuple[Chart, ...]:
    """The charts that `data` has the numbers for, in the order they are read."""
    rows = data.comparison.candidates if data.comparison else ()
    found = []
    if any(row.perplexity is not None for row in rows):
        found.append(_PERPLEXITY)
    if data.headroom is not None:
        found.append(_HEADROOM)
    if data.errors:
        found.append(_ERRORS)
    if data.clip is not None and (data.clip.k or data.clip.v):
        found.append(_CLIP)
    if data.spectra is not None:
        found.append(_SPECTRA)
    return tuple(found)


def arrange(charts: Sequence[Chart]) -> tuple[tuple[Chart, ...], ...]:
    """Rows of one or two charts: two halves that follow each other share a row."""
    rows: list[tuple[Chart, ...]] = []
    for chart in charts:
        if chart.half and rows and len(rows[-1]) == 1 and rows[-1][0].half:
            rows[-1] = (rows[-1][0], chart)
        else:
            rows.append((chart,))
    return tuple(rows)


_PERPLEXITY = Chart(
    "perplexity",
    "Perplexity against BF16",
    "The closer to the BF16 line the better, and what overlaps within its bars (one standard error)"
    " is equal; hollow is without clipping.",
    half=True,
    height=2.9,
    draw=draw_methods.draw_perplexity,
)
_HEADROOM = Chart(
    "headroom",
    "Headroom by layer",
    "How many times less error the best transform could have than any rotation; near 1, a rotation"
    " is as good.",
    half=True,
    height=2.9,
    draw=draw_layers.draw_headroom,
)
_ERRORS = Chart(
    "errors",
    "Output error by layer",
    "Lower is better; look for single layers that stand out, because the worst one decides more"
    " than the mean.",
    half=False,
    height=3.3,
    draw=draw_methods.draw_errors,
)
_CLIP = Chart(
    "clip",
    "Clip curves",
    "Thick is the mean, thin are layers; below zero clipping helps, and a steep left end means that"
    " it soon hurts.",
    half=False,
    height=3.1,
    draw=draw_layers.draw_clip,
)
_SPECTRA = Chart(
    "spectra",
    "Eigenvalue spectra of the fit's targets",
    "The steeper a line crosses the flat one, the fewer directions carry the energy, and the more a"
    " rotation helps.",
    half=False,
    height=3.4,
    draw=draw_layers.draw_spectra,
)
