"""How `auto` chose, as people see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oscar_zoo.cli.render import terminal

if TYPE_CHECKING:
    from oscar_zoo.compute.select.decision import Choice


def print_choice(choice: Choice) -> None:
    """The comparison table, with the candidate that was kept marked; columns that nothing was
    measured for are left."""
    heads = ["METHOD", "K CLIP", "V CLIP", "OUTPUT ERROR"]
    heads += [] if choice.base is None else ["PERPLEXITY", "vs BF16", "± SE", "RECALL"]
    table = terminal.table(*heads, "", right=tuple(range(1, len(heads))))
    if choice.base is not None:
        own = choice.questions.own
        recall = _number(own.value if own else None, ".1%")
        table.add_row(
            "BF16", "", "", "", _number(choice.base.perplexity.value, ",.3f"), "", "", recall, ""
        )
    for row in choice.rows:
        cells = [f"{ratio:.2f}" if ratio else "-" for ratio in (row.clip_k, row.clip_v)]
        cells.append(f"{row.output_error_geo:.2g}")
        if choice.base is not None:
            cells += [_number(row.perplexity, ",.3f"), _number(row.change_percent, "+,.2f", " %")]
            cells += [_number(row.standard_error, ".2f"), _number(row.recall, ".1%")]
        table.add_row(row.method, *cells, "kept" if row is choice.chosen else "")
    terminal.out().print(table)
    if choice.base is not None:
        terminal.out().print(
            f"Perplexity of {choice.measured_on}; other text or windows give other numbers"
        )
    terminal.out().print(f"Kept {choice.chosen.method}: {choice.reason}")


def _number(value: float | None, form: str, unit: str = "") -> str:
    """A number that may not have been measured, or is as good as infinite."""
    return "-" if value is None else "broken" if value >= 1e6 else f"{value:{form}}{unit}"
