"""Draw the picture of the README from a CSV file that `oscar-zoo bench serve --csv` wrote.

    python docs/figures/draw.py [CSV [SVG]]

Left: how many tokens the cache holds. Right: how long one decode step takes, for the cases with the
longest context of their batch. Files of several runs may simply be put one behind the other, in the
order of the runs. The same file gives the same bytes with the same matplotlib.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from oscar_zoo.compute.report.charts import drawing
from oscar_zoo.compute.report.palette import INK, MUTED, PAPER, V_SIDE

HERE = Path(__file__).resolve().parent
CACHES = {"bf16": ("BF16", MUTED), "int2": ("INT2", V_SIDE)}
HEIGHT = 0.36
"""Of a bar; a pair takes less than 1."""


@dataclass(frozen=True)
class Step:
    """One decode step of one case on both sides, in milliseconds."""

    batch: int
    context: int
    bf16: float
    int2: float

    @property
    def label(self) -> str:
        """The case, for people."""
        requests = "1 request" if self.batch == 1 else f"{self.batch} requests"
        return f"{requests},\n{self.context:,} tokens"


def read_capacity(rows: Sequence[dict[str, str]]) -> tuple[int, int]:
    """Tokens of the BF16 and of the INT2 cache, from the last run in the file that has both."""
    found: dict[str, dict[tuple[str, ...], int]] = {cache: {} for cache in CACHES}
    for row in rows:
        if row["capacity_tokens"]:
            case = (row["batch"], row["context"], row["job_turn"])
            found[row["cache"]][case] = int(row["capacity_tokens"])
    both = [case for case in found["bf16"] if case in found["int2"]]
    if not both:
        raise SystemExit("error: no case of the file has the capacity of both caches")
    return found["bf16"][both[-1]], found["int2"][both[-1]]


def read_steps(rows: Sequence[dict[str, str]]) -> list[Step]:
    """The case with the longest context of each batch, where both sides were measured."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row["ms_per_token"]:
            case = (int(row["batch"]), int(row["context"]))
            times.setdefault(case, {})[row["cache"]] = float(row["ms_per_token"])
    longest: dict[int, Step] = {}
    for (batch, context), sides in sorted(times.items()):
        if len(sides) == len(CACHES):
            longest[batch] = Step(batch, context, sides["bf16"], sides["int2"])
    return sorted(longest.values(), key=lambda step: -step.context)


def draw(source: Path, target: Path) -> None:
    """Read `source`, write `target`."""
    with source.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["cache"] in CACHES]
    bf16, int2 = read_capacity(rows)
    steps = read_steps(rows)
    with drawing():
        matplotlib.rcParams["svg.fonttype"] = "path"  # looks the same with any reader's fonts
        matplotlib.rcParams["svg.hashsalt"] = "oscar-zoo"
        layout = ConstrainedLayoutEngine(wspace=0.08, w_pad=0.1, h_pad=0.1)
        figure = Figure(figsize=(8.4, 3.1), facecolor=PAPER, layout=layout)
        FigureCanvasSVG(figure)
        room, speed = figure.subplots(1, 2, width_ratios=[1, 1.1])
        title = f"Tokens that fit: {int2 / bf16:.1f} times as many"
        _pairs(room, title, [""], [(bf16 / 1e6, int2 / 1e6)], "{:.2f} million")
        best = max(step.bf16 / step.int2 for step in steps)
        title = f"A decode step: up to {best:.1f} times as fast"
        pairs = [(step.bf16, step.int2) for step in steps]
        _pairs(speed, title, [step.label for step in steps], pairs, "{:.3g} ms")
        figure.savefig(target, format="svg", facecolor=PAPER, metadata={"Date": None})


def _pairs(
    axes: Axes,
    title: str,
    names: list[str],
    pairs: list[tuple[float, float]],
    unit: str,
) -> None:
    """Two horizontal bars per name, BF16 above INT2, each with its value."""
    for index, (label, colour) in enumerate(CACHES.values()):
        places = [place + (index - 0.5) * (HEIGHT + 0.04) for place in range(len(names))]
        values = [pair[index] for pair in pairs]
        bars: Any = axes.barh(places, values, HEIGHT, color=colour)
        texts = [f"{label}  {unit.format(value)}" for value in values]
        axes.bar_label(bars, texts, padding=4, fontsize=10, color=INK)
    axes.set_title(title, fontsize=11.5, pad=10)
    axes.set_yticks(range(len(names)), names, fontsize=10, color=INK)
    axes.set_xlim(0, max(max(pair) for pair in pairs) * 1.45)
    axes.set_xticks([])
    spare = max(0, 2 - len(names)) / 2  # so that a single pair is not as tall as the chart
    axes.set_ylim(len(names) - 0.5 + spare, -0.5 - spare)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[["bottom"]].set_visible(False)


def main(arguments: Sequence[str]) -> None:
    """Paths from the command line, or the files of this folder."""
    source = Path(arguments[0]) if arguments else HERE / "h200-serving.csv"
    target = Path(arguments[1]) if len(arguments) > 1 else HERE / "serving.svg"
    draw(source, target)


if __name__ == "__main__":
    main(sys.argv[1:])
