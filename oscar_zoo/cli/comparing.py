"""How `auto` chose, as people see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oscar_zoo.cli import render

if TYPE_CHECKING:
    from oscar_zoo.compute.choosing import Choice


def print_choice(choice: Choice) -> None:
    """The comparison table, best clip of each method first seen first, with the one that was kept marked."""
    table = render.table("METHOD", "K CLIP", "V CLIP", "PERPLEXITY", "vs BF16", "± SE", "", right=(1, 2, 3, 4, 5))
    table.add_row("BF16", "", "", f"{choice.bf16_perplexity:,.3f}", "", "", "")
    for trial in choice.trials:
        clip = [f"{ratio:.2f}" if ratio else "-" for ratio in (trial.clip_k, trial.clip_v)]
        change = f"{trial.change_percent:+,.2f} %" if trial.change_percent < 1e6 else "broken"
        noise = f"{trial.standard_error:.2f}" if trial.standard_error < 1e6 else "-"
        value = f"{trial.perplexity:,.3f}" if trial.perplexity < 1e6 else "-"
        table.add_row(trial.method, *clip, value, change, noise, "kept" if trial is choice.chosen else "")
    render.out().print(table)
    render.out().print(f"Kept {choice.chosen.method}: {choice.reason}")
