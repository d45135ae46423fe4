"""Tables that scroll in a box where they are too wide, and whose rows become cards on a phone.

Style sheets that lay rows out as blocks take the meaning of a table away, so every part says its
role.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oscar_zoo.site import numbers
from oscar_zoo.site.html import Html, element

Content = Html | str | Sequence[Html] | None


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        first: what heads the row.
        cells: all others; `None` is a gap, which a card leaves out.
        css: class of the row.
    """

    first: Content
    cells: Sequence[Content]
    css: str | None = None


def table(name: str, heads: Sequence[str], rows: Iterable[Row], *, right: Iterable[str]) -> Html:
    """A table.

    Args:
        rows: as many cells as heads in each, the first included.
    """
    numeric = frozenset(right)
    return element(
        "div",
        element(
            "table",
            element("caption", name),
            element("thead", _heads(heads, numeric), role="rowgroup"),
            element("tbody", [_row(row, heads, numeric) for row in rows], role="rowgroup"),
            role="table",
            class_="stack",
        ),
        class_="table",
        role="region",
        tabindex="0",
        aria_label=name,
    )


def _heads(heads: Sequence[str], numeric: frozenset[str]) -> Html:
    cells = [
        element(
            "th", head, scope="col", role="columnheader", class_="n" if head in numeric else None
        )
        for head in heads
    ]
    return element("tr", cells, role="row")


def _row(row: Row, heads: Sequence[str], numeric: frozenset[str]) -> Html:
    cells = [
        element(
            "td",
            element("div", numbers.NONE if cell is None else cell, class_="cell"),
            role="cell",
            data_head=head,
            class_=" ".join(
                css for css, said in (("n", head in numeric), ("gap", cell is None)) if said
            )
            or None,
        )
        for head, cell in zip(heads[1:], row.cells, strict=True)
    ]
    first = element("th", row.first, scope="row", role="rowheader")
    return element("tr", first, cells, role="row", class_=row.css)
