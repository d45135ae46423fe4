"""What `eval --against` measured, as people see it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.saving import save_after_result

if TYPE_CHECKING:
    from oscar_zoo.evaluate.alternatives.report import AgainstReport, AgainstRow

LONG = "32768"
"""Tokens of the sequences that the second column of bits is for."""


def print_report(report: AgainstReport) -> None:
    """One line per cache, by bits, with the Pareto-optimal ones marked."""
    from oscar_zoo.evaluate.long_context.grid import length_text

    facts, tasks = report.facts, report.facts["tasks"]
    short, long = length_text(facts["length"]), length_text(int(LONG))
    table = terminal.table(
        "CACHE", "BITS", f"AT {short}", f"AT {long}", "KL, nats", "PERPLEXITY", "DIGITS", "ANSWERS",
        right=(1, 2, 3, 4, 5, 6, 7),
    )  # fmt: skip
    for row in report.rows:
        table.add_row(
            terminal.clean(row.cache),
            f"{row.bits_per_element:.2f}",
            f"{row.bits_per_element_with_windows:.2f}{'*' if row.pareto else ' '}",
            f"{row.bits_per_element_at[LONG]:.2f}{'*' if row.pareto_at[LONG] else ' '}",
            *_losses(row),
            f"{row.digits:.1%}",
            f"{row.answers:.1%}",
        )
    terminal.out().print(table)
    divergence, recall = tasks["divergence"], tasks["recall"]
    terminal.prose(
        f"* no cache has fewer bits and less KL, for sequences of so many tokens. KL is measured at"
        f" {divergence['positions']:,} positions of {divergence['windows']} window(s) of"
        f" {facts['length']:,} tokens, recall on {recall['answers']} answers"
    )


def _losses(row: AgainstRow) -> tuple[str, str]:
    """Divergence, and the change of perplexity in percent, with their standard errors."""
    if row.cache == "bf16":
        return "0", f"{row.perplexity:,.3f}"
    kl, change = f"{row.divergence:.2g}", f"{row.perplexity_change:+,.2f}"
    if row.divergence_error is not None:
        kl += f" ± {row.divergence_error:.1g}"
    if row.perplexity_change_error is not None:
        change += f" ± {row.perplexity_change_error:,.2f}"
    return kl, f"{change} %"


def save_plots(report: AgainstReport, title: str, files: tuple[Path, ...], *, quiet: bool) -> int:
    """Draw every file; the exit code is 1 when one could not be written."""

    def drawn(file: Path) -> bytes:
        from oscar_zoo.evaluate.alternatives import chart

        kind = file.suffix.lower()
        if kind == ".html":
            from oscar_zoo.evaluate.alternatives.page import render_html

            return render_html(report, title)
        return chart.render(report, title, svg=kind == ".svg")

    return save_after_result({file: partial(drawn, file) for file in files}, quiet=quiet)
