"""What `ruler` measured, as people see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oscar_zoo.cli.render import terminal
from oscar_zoo.evaluate.cache_names import cache_title

if TYPE_CHECKING:
    from rich.table import Table

    from oscar_zoo.evaluate.long_context.grid import RulerReport


def print_report(report: RulerReport) -> None:
    """A row per cache with the share of right answers at every length, then the depths of the
    longest prompts."""
    from oscar_zoo.evaluate.long_context.grid import length_text

    lengths = report.lengths
    with_bits = any(row.bits_per_element is not None for row in report.rows)
    heads = [length_text(n) for n in lengths]
    columns = [*heads, *(f"BITS AT {head}" for head in heads[-1:] if with_bits)]
    table = terminal.table("RIGHT ANSWERS", *columns, right=tuple(range(1, len(columns) + 1)))
    for cache in report.caches:
        rows = {row.length: row for row in report.rows if row.cache == cache}
        bits = rows[lengths[-1]].bits_per_element
        last = [f"{bits:.2f}"] if bits is not None else []
        table.add_row(cache_title(cache), *(f"{rows[n].share:.1%}" for n in lengths), *last)
    terminal.out().print(table)
    terminal.out().print(_families(report))
    if report.depths:
        terminal.out().print(_depths(report, lengths[-1]))
    each = report.facts["samples"]
    text = f"{each} {'prompt' if each == 1 else 'prompts'} for each family, length and depth"
    terminal.out().print(f"Whole answers; {text}; the first table has the mean over families")


def _families(report: RulerReport) -> Table:
    """A row per family, with all lengths together."""
    from oscar_zoo.evaluate.long_context.families import FAMILIES

    names = [cache_title(cache) for cache in report.caches]
    table = terminal.table("FAMILY", *names, right=tuple(range(1, len(names) + 1)))
    for family in report.families:
        shares = (report.family(cache, family) for cache in report.caches)
        title = f"{family}: {FAMILIES[family].title}"
        table.add_row(title, *(f"{share:.1%}" for share in shares))
    return table


def _depths(report: RulerReport, length: int) -> Table:
    """A row per cache: how it does by depth at one length."""
    places = [f"{depth:.0%}" for depth in report.depths]
    head = f"DEPTH, {length:,} TOKENS"
    table = terminal.table(head, *places, right=tuple(range(1, len(places) + 1)))
    for cache in report.caches:
        shares = (report.place(cache, length, depth) for depth in report.depths)
        table.add_row(cache_title(cache), *("" if x is None else f"{x:.0%}" for x in shares))
    return table
