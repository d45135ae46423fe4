"""The chart of bits: the curve from 2 to 4 bits, and what each side of each layer gains alone.

It draws with the axes that it is given and imports no library for that.
"""

from __future__ import annotations

from typing import Any

from oscar_zoo.artifact.width_selection import WidthSelection, WidthStep
from oscar_zoo.compute.report import text
from oscar_zoo.compute.report.data import ReportData
from oscar_zoo.compute.report.palette import FAINT, INK, K_SIDE, MUTED, V_SIDE

_LEAST = 1e-7
"""Divergence, in nats, below which nothing can be told; log axes end there."""


def draw_widths(figure: Any, data: ReportData) -> None:
    """The curve, and beside it the gains by layer where single raises were measured."""
    found = data.widths
    assert found is not None
    if found.gains_k is None:
        _curve(figure.subplots(), found)
        return
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (3, 2)})
    _curve(left, found)
    _map(figure, right, found)


def _curve(axes: Any, found: WidthSelection) -> None:
    """Predicted divergence as a line with its standard error, measured points with theirs."""
    told = [step for step in found.steps if step.predicted is not None]
    if told:
        bits = [step.bits for step in told]
        middle = [max(step.predicted or 0.0, _LEAST) for step in told]
        errors = [step.predicted_error or 0.0 for step in told]
        low = [max(value - error, value / 4) for value, error in zip(middle, errors, strict=True)]
        high = [value + error for value, error in zip(middle, errors, strict=True)]
        axes.fill_between(bits, low, high, color=FAINT, alpha=0.35, linewidth=0)
        axes.plot(bits, middle, color=MUTED, linewidth=1.6, label="predicted from single raises")
    for at, step in enumerate(found.steps):
        _measured(axes, step, kept=at == found.chosen)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.set_xlabel("bits per element, scales included")
    axes.set_ylabel("KL from the exact cache, nats")
    axes.margins(x=0.12, y=0.18)
    axes.legend(fontsize=8, frameon=False)


def _measured(axes: Any, step: WidthStep, *, kept: bool) -> None:
    found = step.verified
    if found is None or found.divergence is None:
        return
    value, error = max(found.divergence, _LEAST), found.divergence_error or 0.0
    down = min(error, 0.75 * value)
    axes.errorbar(
        step.bits, value, yerr=[[down], [error]], fmt="o", color=K_SIDE if kept else INK,
        markersize=8 if kept else 5, label="measured, kept" if kept else None,
    )  # fmt: skip
    words = [f"{value:.2g}"]
    words += [] if found.change_percent is None else [text.change(found.change_percent)]
    words += [] if found.recall is None else [f"recall {text.recall(found.recall)}"]
    axes.annotate(
        "\n".join(words), (step.bits, value), (8, 4), textcoords="offset points", fontsize=8,
        weight="bold" if kept else "normal", color=INK,
    )  # fmt: skip


def _map(figure: Any, axes: Any, found: WidthSelection) -> None:
    """Layers downwards, keys and values beside each other; a dot marks codes of 4 bits."""
    rows = list(zip(found.gains_k or (), found.gains_v or (), strict=True))
    shown = [[max(gain, 0.0) for gain in row] for row in rows]
    image = axes.imshow(shown, aspect="auto", cmap="Oranges", vmin=0)
    for at, layer in enumerate(found.layers):
        for column, side in enumerate("kv"):
            if (layer, side) in found.raised:
                axes.plot(column, at, "o", color=V_SIDE if side == "v" else K_SIDE, markersize=6)
    axes.set_xticks([0, 1], ["keys", "values"])
    stride = max(1, -(-len(found.layers) // 12))
    axes.set_yticks(range(0, len(rows), stride), [str(one) for one in found.layers[::stride]])
    axes.set_ylabel("layer")
    axes.grid(visible=False)
    axes.set_title("KL taken away by raising alone; dot: 4 bits")
    figure.colorbar(image, ax=axes, label="nats")
