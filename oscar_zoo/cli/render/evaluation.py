"""What `eval` measured in this process, as people see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.names import path_text
from oscar_zoo.cli.render import terminal
from oscar_zoo.evaluate.cache_names import cache_title

if TYPE_CHECKING:
    from rich.table import Table

    from oscar_zoo.evaluate.run import EvalReport

    Row = Mapping[str, Any]

_VALUES = {"sink": "SINK", "recent": "RECENT", "clip": "CLIP", "group_size": "GROUP"}
"""Columns of what may differ between rows of one cache."""
_SHORT = {"bf16": "BF16", "artifact": "INT2"}
"""Names of the caches where these columns need the room."""


def print_report(report: EvalReport, data: str) -> None:
    """One line per cache, with the change against BF16, and what an element costs in long
    sequences; `data` is the text that was measured on."""
    facts = report.to_json()
    rows = facts["rows"]
    terminal.out().print(_measured(rows, facts["length"]))
    print_bits(rows)
    if "perplexity" in facts["tasks"]:
        cut = facts["tasks"]["perplexity"]
        terminal.prose(
            f"Perplexity of {cut['windows']} window(s) of {cut['length']:,} tokens of {data}, all"
            " positions; other text or windows give other numbers"
        )
    if report.record is not None:
        terminal.out().print(f"Scores: {terminal.clean(path_text(report.record))}")


def _measured(rows: Sequence[Row], length: int) -> Table:
    """Bits and results of every row; `length` is that of the sequences in tokens."""
    from oscar_zoo.evaluate.long_context.grid import length_text

    base, changed = rows[0]["perplexity"], _changed(rows)
    with_recall = rows[0]["recall"] is not None
    columns = [*changed.values(), "BITS", f"BITS AT {length_text(length)}"]
    columns += ["PERPLEXITY", "vs BF16"] if base is not None else []
    columns += ["RECALL"] if with_recall else []
    table = terminal.table("CACHE", *columns, right=tuple(range(1, len(columns) + 1)))
    for row in rows:
        cells = [str(row["changes"].get(name, "")) for name in changed]
        cells += [f"{row['bits_per_element']:.2f}", f"{row['bits_per_element_with_windows']:.2f}"]
        if base is not None:
            value = row["perplexity"]
            cells += [
                f"{value:,.3f}",
                "" if row is rows[0] else f"{100 * (value / base - 1):+,.1f} %",
            ]
        if with_recall:
            cells.append(f"{row['recall']:.1%}")
        name = row["cache"]
        table.add_row(_SHORT[name] if changed else cache_title(name), *cells)
    return table


def print_bits(rows: Sequence[Row]) -> None:
    """Bits of an element in long sequences: a line where all rows have the same, else a table."""
    from oscar_zoo.evaluate.long_context.grid import length_text

    changed = {name: head for name, head in _changed(rows).items() if name != "clip"}
    heads = [length_text(int(tokens)) for tokens in rows[-1]["bits_per_element_at"]]
    several = list(_distinct(rows[1:], changed))
    if len(several) == 1:
        bits = rows[-1]["bits_per_element_at"].values()  # of the artifact, where there is one
        each = ", ".join(f"{count:.2f} at {head}" for head, count in zip(heads, bits, strict=True))
        whose = "" if several[0]["bits_per_element"] == rows[-1]["bits_per_element"] else " of it"
        terminal.prose(f"Bits of an element{whose} by tokens of a sequence, with windows: {each}")
        return
    columns = [*list(changed.values())[1:], *(f"BITS AT {head}" for head in heads)]
    first = next(iter(changed.values()))
    table = terminal.table(first, *columns, right=tuple(range(len(columns) + 1)))
    for row in several:
        values = (str(row["changes"][name]) for name in changed)
        table.add_row(*values, *(f"{bits:.2f}" for bits in row["bits_per_element_at"].values()))
    terminal.out().print(table)


def _changed(rows: Sequence[Row]) -> dict[str, str]:
    """The columns of `_VALUES` that these rows need."""
    return {name: head for name, head in _VALUES.items() if name in rows[-1]["changes"]}


def _distinct(rows: Sequence[Row], names: Mapping[str, str]) -> Iterator[Row]:
    """The first row for each combination of the values `names`."""
    seen = set()
    for row in rows:
        values = tuple(row["changes"].get(name) for name in names)
        if values not in seen:
            seen.add(values)
            yield row
