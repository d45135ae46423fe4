"""Draw the picture of the README from a CSV file that `oscar-zoo bench serve --csv` wrote.

    python docs/figures/draw.py [CSV [SVG]]

Left: how many tokens the cache holds. Right: how long one decode step takes, for the cases with the
longest context of their batch. Files of several runs may simply be put one behind the other, in the
order of the runs. A cache with several attention backends has its best time. FP8 is drawn where the
file has it. The same file gives the same bytes with the same matplotlib.
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

from oscar_zoo.compute.report.charts import INK, K_SIDE, MUTED, PAPER, V_SIDE, drawing

HERE = Path(__file__).resolve().parent
CACHES = {"bf16": ("BF16", MUTED), "fp8": ("FP8", K_SIDE), "int2": ("INT2", V_SIDE)}
BOTH = ("bf16", "int2")
"""The caches that the file must have."""
GROUP = 0.76
"""Height of the bars of one case, of 1."""


@dataclass(frozen=True)
class Step:
    """One decode step of one case, in milliseconds by cache."""

    batch: int
    context: int
    times: dict[str, float]

    @property
    def label(self) -> str:
        """The case, for people."""
        requests = "1 request" if self.batch == 1 else f"{self.batch} requests"
        return f"{requests},\n{self.context:,} tokens"


def read_capacity(rows: Sequence[dict[str, str]]) -> dict[str, int]:
    """Tokens of each cache, from the last run in the file that has all of its caches."""
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for row in rows:
        if row["capacity_tokens"]:
            case = (row["batch"], row["context"], row["job_turn"])
            found.setdefault(case, {})[row["cache"]] = int(row["capacity_tokens"])
    caches = caches_of(rows)
    complete = [case for case in found.values() if case.keys() >= caches]
    if not complete:
        raise SystemExit("error: no case of the file has the capacity of all caches")
    return {cache: complete[-1][cache] for cache in CACHES if cache in caches}


def read_steps(rows: Sequence[dict[str, str]]) -> list[Step]:
    """The case with the longest context of each batch, where all caches were measured."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row["ms_per_token"]:
            case = times.setdefault((int(row["batch"]), int(row["context"])), {})
            time = float(row["ms_per_token"])
            case[row["cache"]] = min(time, case.get(row["cache"], time))
    caches = caches_of(rows)
    longest: dict[int, Step] = {}
    for (batch, context), case in sorted(times.items()):
        if case.keys() >= caches:
            longest[batch] = Step(batch, context, {c: case[c] for c in CACHES if c in caches})
    if not longest:
        raise SystemExit("error: no case of the file has a decode step of all caches")
    return sorted(longest.values(), key=lambda step: -step.context)


def caches_of(rows: Sequence[dict[str, str]]) -> set[str]:
    """The caches that the file has, and those that it must have."""
    return {row["cache"] for row in rows} | set(BOTH)


def draw(source: Path, target: Path) -> None:
    """Read `source`, write `target`."""
    with source.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["cache"] in CACHES]
    capacity = read_capacity(rows)
    steps = read_steps(rows)
    with drawing():
        matplotlib.rcParams["svg.fonttype"] = "path"  # looks the same with any reader's fonts
        matplotlib.rcParams["svg.hashsalt"] = "oscar-zoo"
        layout = ConstrainedLayoutEngine(wspace=0.08, w_pad=0.1, h_pad=0.1)
        figure = Figure(figsize=(8.4, 3.1), facecolor=PAPER, layout=layout)
        FigureCanvasSVG(figure)
        room, speed = figure.subplots(1, 2, width_ratios=[1, 1.1])
        gains = {cache: capacity["int2"] / capacity[cache] for cache in capacity}
        title = _title("Tokens that fit: {:.1f} times as many", "Tokens that fit: {}", gains)
        millions = {cache: tokens / 1e6 for cache, tokens in capacity.items()}
        _groups(room, title, [""], [millions], "{:.2f} million")
        gains = {
            cache: max(step.times[cache] / step.times["int2"] for step in steps)
            for cache in steps[0].times
        }
        title = _title("A decode step: up to {:.1f} times as fast", "A step: up to {}", gains)
        _groups(
            speed,
            title,
            [step.label for step in steps],
            [step.times for step in steps],
            "{:.3g} ms",
        )
        figure.savefig(target, format="svg", facecolor=PAPER, metadata={"Date": None})


def _title(one: str, several: str, gains: dict[str, float]) -> str:
    """`one` with what INT2 gains over BF16, or `several` with what it gains over each cache."""
    others = [f"{gains[c]:.1f}x {CACHES[c][0]}" for c in gains if c != "int2"]
    return one.format(gains["bf16"]) if len(others) == 1 else several.format(", ".join(others))


def _groups(
    axes: Axes,
    title: str,
    names: list[str],
    groups: list[dict[str, float]],
    unit: str,
) -> None:
    """Horizontal bars for each name, cache below cache, each with its value."""
    slot = (GROUP + 0.04) / len(groups[0])
    for index, cache in enumerate(groups[0]):
        label, colour = CACHES[cache]
        middle = (len(groups[0]) - 1) / 2
        places = [place + (index - middle) * slot for place in range(len(names))]
        values = [group[cache] for group in groups]
        bars: Any = axes.barh(places, values, slot - 0.04, color=colour)
        texts = [f"{label}  {unit.format(value)}" for value in values]
        axes.bar_label(bars, texts, padding=4, fontsize=10, color=INK)
    axes.set_title(title, fontsize=11.5, pad=10)
    axes.set_yticks(range(len(names)), names, fontsize=10, color=INK)
    axes.set_xlim(0, max(max(group.values()) for group in groups) * 1.45)
    axes.set_xticks([])
    spare = max(0, 2 - len(names)) / 2  # so that a single group is not as tall as the chart
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
