"""How bits were chosen per layer and side, as people see it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from oscar_zoo.artifact.width_selection import WidthSelection, WidthStep
from oscar_zoo.cli.render import terminal

AROUND = 2
"""Steps that are shown before and behind the one that was kept; the first and last always are."""


def width_lines(found: WidthSelection) -> list[RenderableType]:
    """The curve as a table, in which the kept step is marked, with a legend and the reason below.

    `KL` is the divergence of the next token's distribution from that with the exact cache.
    """
    heads = ["RAISED", "BITS", "PREDICTED KL", "MEASURED KL", "± SE", "OF 2 BITS", "vs BF16"]
    table = terminal.table(*heads, "RECALL", "", right=tuple(range(1, 8)))
    before = None
    for at in _shown(found):
        if before is not None and at > before + 1:
            table.add_row(f".. {at - before - 1} more", *[""] * 8)
        table.add_row(*_cells(found, at), "kept" if at == found.chosen else "")
        before = at
    legend = (
        "RAISED: the side of a layer, K or V, that gets codes of 4 bits beside all above it; OF 2"
        " BITS: the share of the KL with 2 bits that is left; vs BF16: rise of perplexity; RECALL:"
        " digits of facts that are predicted right; -: not measured"
    )
    text = (
        f"KL in nats per position, on {found.positions:,} positions of {found.prompts} held-out"
        " prompts; predicted from raises measured one by one"
    )
    kept = f"Kept {found.kept.bits:.4g} bits per element ({raises(found)}): {found.reason}"
    return [table, legend, text, kept, f"With the windows: {with_windows(found)}"]


def raises(found: WidthSelection) -> str:
    """What has codes of 4 bits, in words."""
    number, all_slots = len(found.raised), 2 * len(found.layers)
    if number in (0, all_slots):
        return f"codes of {4 if number else 2} bits everywhere"
    names = [step.name for step in found.steps[1 : found.chosen + 1]]
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"4 bits in {number} of {all_slots} sides of layers: {listed}"


def with_windows(found: WidthSelection) -> str:
    """Bits of an element with the high-precision windows, for some lengths."""
    return ", ".join(
        f"{bits:.3g} bits at {int(length) // 1024}k" for length, bits in _by_length(found)
    )


def course(found: WidthSelection) -> str:
    """The curve in one line: bits and divergence of the steps that were measured."""
    points = [
        f"{step.bits:.4g} bits {_divergence(step)}"
        for step in found.steps
        if step.verified is not None and step.verified.divergence is not None
    ]
    return ", ".join(points)


def _by_length(found: WidthSelection) -> Iterator[tuple[str, float]]:
    return iter(sorted(found.bits_at.items(), key=lambda one: int(one[0])))


def _shown(found: WidthSelection) -> list[int]:
    last = len(found.steps) - 1
    near = range(max(1, found.chosen - AROUND), min(last, found.chosen + AROUND) + 1)
    return sorted({0, 1, *near, last} & set(range(last + 1)))


def _divergence(step: WidthStep) -> str:
    value = step.verified.divergence if step.verified else None
    return "-" if value is None else f"{value:.2g}"


def _cells(found: WidthSelection, at: int) -> list[str]:
    step, first = found.steps[at], found.steps[0]
    measured = step.verified
    value = (
        step.predicted if measured is None or measured.divergence is None else measured.divergence
    )
    whole = first.verified.divergence if first.verified else first.predicted
    error = measured.divergence_error if measured else step.predicted_error
    change = measured.change_percent if measured else None
    recall = measured.recall if measured else None
    return [
        "2 bits" if at == 0 else step.name,
        f"{step.bits:.4g}",
        "-" if step.predicted is None else f"{step.predicted:.2g}",
        _divergence(step),
        "-" if error is None else f"{error:.1g}",
        f"{value / whole:.0%}" if value is not None and whole else "-",
        "-" if change is None else f"{change:+.2f} %",
        "-" if recall is None else f"{recall:.1%}",
    ]
