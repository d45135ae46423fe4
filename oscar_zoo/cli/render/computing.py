"""A planned computation and its result, as people and programs see them."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from oscar_zoo.artifact.names import typed
from oscar_zoo.artifact.width_selection import VerifiedWidths, WidthSelection
from oscar_zoo.cli.pasting import measuring, pasted, saved
from oscar_zoo.cli.render import terminal
from oscar_zoo.evaluate.shared import duration
from oscar_zoo.observer import Note
from oscar_zoo.serving.artifact_model import model_argument

if TYPE_CHECKING:
    from oscar_zoo.compute.outcome import ComputeResult, Drawn, FitResult, MergeResult
    from oscar_zoo.compute.params import ComputeCommand, FitParams, MergeParams, PlotParams
    from oscar_zoo.compute.select.decision import Choice

AROUND = 2
"""Steps that are shown before and behind the one that was kept; the first and last always are."""


def choice_lines(choice: Choice) -> list[RenderableType]:
    """The comparison table, in which the kept candidate is marked, and the reason below it. Columns
    of what was not measured are left out."""
    base, chosen = choice.base, choice.chosen
    heads = ["METHOD", "K CLIP", "V CLIP", "OUTPUT ERROR"]
    heads += ["TEXT", "KL", "PERPLEXITY", "vs BF16", "± SE", "RECALL"] if base else []
    table = terminal.table(*heads, "", right=tuple(range(1, len(heads))))
    if base is not None:
        recall = _number(base.answers.value if base.answers else None, ".1%")
        perplexity = _number(base.perplexity.value, ",.3f")
        table.add_row("BF16", "", "", "", "", "", perplexity, "", "", recall, "")
    for row in choice.rows:
        cells = ["-" if ratio == "0" else ratio for ratio in row.clip_texts]
        cells.append(f"{row.output_error_geo:.2g}")
        if base is not None:
            text = f"{row.sequences}/{len(base.perplexity.parts)}" if row.sequences else "-"
            cells += [text, _number(row.divergence, ".2g")]
            cells += [_number(row.perplexity, ",.3f"), _number(row.change_percent, "+,.2f", " %")]
            cells += [_number(row.standard_error, ".2f"), _number(row.recall, ".1%")]
        table.add_row(row.method, *cells, "kept" if row is chosen else "")
    lines: list[RenderableType] = [table]
    if base is not None:
        lines.append(
            f"Perplexity of {choice.measured_on}; other text or windows give other numbers"
        )
    if base is not None and any(row.perplexity is None for row in choice.rows):
        lines.append(
            "TEXT is the share of these sequences: what could not win left early; vs BF16 is of"
            " the same share"
        )
    clip = f" with clip {','.join(chosen.clip_texts)}" if chosen.clip_k or chosen.clip_v else ""
    return [*lines, f"Kept {chosen.method}{clip}: {choice.reason}"]


def _number(value: float | None, form: str, unit: str = "") -> str:
    """A number; `-` where none was measured, and `broken` where it is as good as infinite."""
    return "-" if value is None else "broken" if value >= 1e6 else f"{value:{form}}{unit}"


def width_lines(found: WidthSelection) -> list[RenderableType]:
    """The curve as a table, in which the kept step is marked, with a legend and the reason below.
    `KL` is the divergence of the next token's distribution from that with the exact cache."""
    heads = ["RAISED", "BITS", "PREDICTED KL", "MEASURED KL", "± SE", "OF 2 BITS", "vs BF16"]
    table = terminal.table(*heads, "RECALL", "", right=tuple(range(1, 8)))
    last = len(found.steps) - 1
    near = range(max(1, found.chosen - AROUND), min(last, found.chosen + AROUND) + 1)
    before = -1
    for at in sorted({0, 1, *near, last} & set(range(last + 1))):
        if at > before + 1:
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


def _cells(found: WidthSelection, at: int) -> list[str]:
    step, first = found.steps[at], found.steps[0]
    measured = step.verified or VerifiedWidths()
    value = step.predicted if measured.divergence is None else measured.divergence
    whole = first.verified.divergence if first.verified else first.predicted
    error = measured.divergence_error if step.verified else step.predicted_error
    return [
        "2 bits" if at == 0 else step.name,
        f"{step.bits:.4g}",
        _number(step.predicted, ".2g"),
        _number(measured.divergence, ".2g"),
        _number(error, ".1g"),
        f"{value / whole:.0%}" if value is not None and whole else "-",
        _number(measured.change_percent, "+.2f", " %"),
        _number(measured.recall, ".1%"),
    ]


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
    at = sorted((int(length), bits) for length, bits in found.bits_at.items())
    return ", ".join(f"{bits:.3g} bits at {length // 1024}k" for length, bits in at)


def course(found: WidthSelection) -> str:
    """The curve in one line: bits and divergence of the steps that were measured."""
    points = (
        f"{step.bits:.4g} bits {step.verified.divergence:.2g}"
        for step in found.steps
        if step.verified is not None and step.verified.divergence is not None
    )
    return ", ".join(points)


def about(seconds: float | None) -> str:
    """How long a computation takes, as rough as the estimate is."""
    return "nobody can say how long" if seconds is None else f"about {duration(seconds)}"


def plan_sentence(facts: Mapping[str, Any]) -> str:
    """What a computation would do; `facts` are those of `ComputePlan`."""
    text = (
        f"{facts['tokens']:,} tokens of {facts['data']} on {facts['device']}:"
        f" {about(facts['seconds'])}."
    )
    if facts["fetched_bytes"] is not None:
        size = terminal.gigabytes(facts["fetched_bytes"])
        text += f" Its weights, {size}, are fetched first unless they are here."
    return text


def show(result: ComputeResult, params: ComputeCommand, *, quiet: bool) -> None:
    """How `auto` chose, and where the artifact is: the data of `compute`; then what lies beside
    it, and the command that measures it."""
    if result.choice is not None:
        _print(choice_lines(result.choice))
    if result.widths is not None:
        _print(width_lines(result.widths.selection))
    _print([saved(result.path, result.manifest)])
    if result.report is not None:
        terminal.note(f"Report: {typed(result.report)}", quiet=quiet)
    if result.moments is not None:
        text = "Moments beside it, for another method without the model"
        terminal.note(f"{text}: {typed(result.moments)}", quiet=quiet)
    from oscar_zoo.cli.render.progress import TerminalObserver  # which words notes with this module

    observer = TerminalObserver(quiet=quiet)
    for text in result.notes:
        observer.note(Note("compute.remark", text))
    at = f" --revision {quote(params.revision)}" if params.revision else ""
    model = model_argument(str(params.given().model))
    terminal.note(f"Next: oscar-zoo eval {pasted(result.path)} --model {model}{at}", quiet=quiet)


def show_fit(result: FitResult, params: FitParams, *, quiet: bool) -> None:
    """Where the artifact is, and how to measure it."""
    _print([saved(result.path, result.manifest)])
    terminal.note(measuring(result.path, result.manifest.model.id), quiet=quiet)


def show_merged(merged: MergeResult, params: MergeParams, *, quiet: bool) -> None:
    """The file that was written, and what is lost in it."""
    facts = f"{merged.tokens:,} tokens, {terminal.megabytes(merged.size)}  sha256:{merged.sha256}"
    _print([f"Saved {terminal.clean(typed(merged.path))}  {facts}"])
    for note in merged.notes:
        terminal.note(f"note: {note}", quiet=quiet)


def show_drawn(drawn: Drawn, params: PlotParams, *, quiet: bool) -> None:
    """The file that was drawn."""
    _print([f"Saved {terminal.clean(typed(drawn.path))}"])


def _print(lines: list[RenderableType]) -> None:
    for line in lines:
        terminal.out().print(line)
