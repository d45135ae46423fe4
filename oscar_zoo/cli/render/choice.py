"""How `auto` chose a method, as people see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from oscar_zoo.cli.render import terminal

if TYPE_CHECKING:
    from oscar_zoo.compute.select.decision import Choice
    from oscar_zoo.compute.select.rule import Base


def print_choice(choice: Choice) -> None:
    """Print the comparison on stdout."""
    for line in choice_lines(choice):
        terminal.out().print(line)


def choice_lines(choice: Choice) -> list[RenderableType]:
    """The comparison table, in which the kept candidate is marked, and the reason below it.

    Columns of what was not measured are left out.
    """
    heads = ["METHOD", "K CLIP", "V CLIP", "OUTPUT ERROR"]
    heads += (
        [] if choice.base is None else ["TEXT", "KL", "PERPLEXITY", "vs BF16", "± SE", "RECALL"]
    )
    table = terminal.table(*heads, "", right=tuple(range(1, len(heads))))
    if choice.base is not None:
        own = choice.questions.own
        recall = _number(own.value if own else None, ".1%")
        table.add_row(
            "BF16",
            "",
            "",
            "",
            "",
            "",
            _number(choice.base.perplexity.value, ",.3f"),
            "",
            "",
            recall,
            "",
        )
    for row in choice.rows:
        cells = ["-" if ratio == "0" else ratio for ratio in row.clip_texts]
        cells.append(f"{row.output_error_geo:.2g}")
        if choice.base is not None:
            cells += [_share(row.sequences, choice.base), _number(row.divergence, ".2g")]
            cells += [_number(row.perplexity, ",.3f"), _number(row.change_percent, "+,.2f", " %")]
            cells += [_number(row.standard_error, ".2f"), _number(row.recall, ".1%")]
        table.add_row(row.method, *cells, "kept" if row is choice.chosen else "")
    lines: list[RenderableType] = [table]
    if choice.base is not None:
        lines.append(
            f"Perplexity of {choice.measured_on}; other text or windows give other numbers"
        )
        if any(row.perplexity is None for row in choice.rows):
            lines.append(
                "TEXT is the share of these sequences: what could not win left early; vs BF16 is of"
                " the same share"
            )
    chosen = choice.chosen
    clip = f" with clip {','.join(chosen.clip_texts)}" if chosen.clip_k or chosen.clip_v else ""
    return [*lines, f"Kept {chosen.method}{clip}: {choice.reason}"]


def _share(sequences: int | None, base: Base) -> str:
    """The part of the held-out sequences that a candidate was measured on."""
    return "-" if sequences is None else f"{sequences}/{len(base.perplexity.parts)}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    """A number; `-` where none was measured, and `broken` where it is as good as infinite."""
    return "-" if value is None else "broken" if value >= 1e6 else f"{value:{form}}{unit}"
