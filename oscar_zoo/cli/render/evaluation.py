"""What `eval` measured in this process, as people see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oscar_zoo.artifact.names import path_text
from oscar_zoo.cli.render import terminal
from oscar_zoo.evaluate.cache_names import cache_title

if TYPE_CHECKING:
    from oscar_zoo.evaluate.run import EvalReport


def print_report(report: EvalReport, data: str) -> None:
    """One line per cache, with the change against BF16; `data` is the text that was measured on."""
    facts = report.to_json()
    rows = facts["rows"]
    base = rows[0]["perplexity"]
    with_recall = any(row["recall"] is not None for row in rows)
    columns = (["PERPLEXITY", "vs BF16"] if base is not None else []) + (
        ["RECALL"] if with_recall else []
    )
    table = terminal.table("CACHE", "BITS", *columns, right=(1, 2, 3, 4))
    for row in rows:
        cells = [cache_title(row["cache"]), f"{row['bits_per_element']:.2f}"]
        if base is not None:
            value = row["perplexity"]
            cells += [
                f"{value:,.3f}",
                "" if row is rows[0] else f"{100 * (value / base - 1):+,.1f} %",
            ]
        if with_recall:
            cells.append(f"{row['recall']:.1%}")
        table.add_row(*cells)
    terminal.out().print(table)
    if base is not None:
        cut = facts["tasks"]["perplexity"]
        text = (
            f"{cut['windows']} window(s) of {cut['length']:,} tokens of {terminal.clean(data)}, all"
            " positions"
        )
        terminal.out().print(f"Perplexity of {text}; other text or windows give other numbers")
    if report.record is not None:
        terminal.out().print(f"Scores: {terminal.clean(path_text(report.record))}")
