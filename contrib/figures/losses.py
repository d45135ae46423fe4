"""Draw loss against bits on several models from what `oscar-zoo eval --against all --json` printed.

    python contrib/figures/losses.py SVG|PNG JSON...

A panel for each file, in the order of the files: bits of an element in sequences of 32,768 tokens,
windows included, and the divergence from the exact cache, both measured for the model of the file.
Each method is one line with its label behind it, the artifact a thick one by its own name; settings
that only take a method apart (`kivi-token` and the like) are left out. The ground is transparent,
and every colour has the same contrast with white as with a dark page. The same files give the same
bytes with the same matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from oscar_zoo.compute.report.charts import drawing
from oscar_zoo.evaluate.against_table import LONG

SCHEMA = "oscar-zoo.eval-against/1"
OWN, INK = "#d34b11", "#6e7a87"
METHODS = {
    "int2": ("INT", "#907610", "s"),
    "k4v2": ("INT", "#907610", "s"),
    "int4": ("INT", "#907610", "s"),
    "hadamard": ("Hadamard", "#c9449d", "P"),
    "kivi": ("KIVI", "#188a5a", "^"),
    "omni-scaled": ("OScaR", "#1e7ad5", "h"),
    "turboquant": ("TurboQuant", "#8e5de2", "o"),
    "lmdeploy": ("LMDeploy", "#d1485f", "d"),
    "fp8": ("FP8", "#6e7a87", "D"),
    "fp8-scaled": ("FP8, scaled", "#158590", "D"),
}
"""Label, colour and marker by the name of a cache; colours have a luminance of 0.19."""
TICKS = (2, 2.5, 3, 3.5, 4, 5, 6, 8)
SIZE = 8.5
"""Points of labels and ticks."""


def read_report(path: Path) -> dict[str, Any]:
    """The JSON of one run; ends the program for any other file."""
    try:
        report: Any = json.loads(path.read_text("utf-8"))
    except ValueError:
        report = None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise SystemExit(f"error: {path} is not what eval --against --json prints; give such files")
    return report


def lines_of(report: dict[str, Any]) -> dict[tuple[str, str, str], list[tuple[float, float]]]:
    """Bits and losses by label, colour and marker, ascending; the artifact's come last."""
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in sorted(report["rows"], key=lambda one: one["own"]):
        known = METHODS.get(row["cache"].partition(":")[0])
        style = (row["title"].partition(":")[0], OWN, "*") if row["own"] else known
        if style is not None and row["divergence"]:
            point = row["bits_per_element_at"][LONG], row["divergence"]
            found.setdefault(style, []).append(point)
    return {style: sorted(points) for style, points in found.items()}


def panel(axes: Axes, report: dict[str, Any]) -> None:
    """The lines of one model."""
    lines = lines_of(report)
    for (_, colour, marker), points in lines.items():
        thick = colour == OWN
        axes.plot(
            *zip(*points, strict=True), color=colour, marker=marker, zorder=3 if thick else 2,
            linewidth=2.4 if thick else 1.1, markersize=10 if thick else 4.5,
        )  # fmt: skip
    axes.set_title(report["model"]["id"].rpartition("/")[2], color=INK, fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_xlim(2, 9)
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(colors=INK, which="both", labelsize=SIZE)
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    axes.spines[["left", "bottom"]].set_color(INK)


def write_labels(axes: Axes, report: dict[str, Any]) -> None:
    """The name of each line right of the panel, at the height of its end or as near as there is
    room, with a thin line to it."""
    lines = lines_of(report)
    into_axes = axes.transScale + axes.transLimits
    ends = {style: float(into_axes.transform(points[-1])[1]) for style, points in lines.items()}
    order = sorted(ends, key=ends.__getitem__)
    room, places = 1 / max(len(order), 14), list[float]()
    for at, style in enumerate(order):
        lowest = places[-1] + room if places else 0.0
        places.append(min(max(ends[style], lowest), 1 - room * (len(order) - 1 - at)))
    for style, place in zip(order, places, strict=True):
        label, colour, _ = style
        axes.annotate(
            label, lines[style][-1], (1.03, place),
            textcoords="axes fraction", va="center", color=colour,
            fontsize=SIZE, weight="bold" if colour == OWN else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6},
        )  # fmt: skip


def draw(sources: Sequence[Path], target: Path) -> None:
    """Read `sources`, write `target`."""
    reports = [read_report(source) for source in sources]
    with drawing():
        mpl.rcParams["svg.fonttype"] = "path"  # looks the same with any reader's fonts
        mpl.rcParams["svg.hashsalt"] = "oscar-zoo"
        columns = min(len(reports), 3)
        rows = -(-len(reports) // columns)
        figure = Figure(figsize=(1 + 3.7 * columns, 0.5 + 3.2 * rows), layout="constrained")
        panels: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        panels = panels.ravel().tolist()
        for axes, report in zip(panels, reports, strict=False):
            panel(axes, report)
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        figure.draw_without_rendering()  # so that limits are final
        for axes, report in zip(panels, reports, strict=False):
            write_labels(axes, report)
        for axes in panels[len(reports) :]:
            axes.set_visible(False)
        bits = f"bits of an element, windows included, in sequences of {int(LONG):,} tokens"
        figure.supxlabel(bits, color=INK, fontsize=9.5)
        figure.supylabel("KL from the exact cache, nats", color=INK, fontsize=9.5)
        metadata: Any = {"Date": None} if target.suffix == ".svg" else {"Software": "oscar-zoo"}
        figure.savefig(target, dpi=150, transparent=True, metadata=metadata)


def main(arguments: Sequence[str]) -> None:
    """Paths from the command line."""
    if len(arguments) < 2 or Path(arguments[0]).suffix not in (".svg", ".png"):
        raise SystemExit("error: give an .svg or .png file to write, then JSON files to read")
    draw([Path(source) for source in arguments[1:]], Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
