"""The parts of a hub's `README.md` that this tool keeps: metadata of the artifacts in the front
matter, and a section with their table, each between two markers.

Everything outside the markers belongs to the owner of the hub and stays byte for byte; what has
damaged markers is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from oscar_zoo.registry import card_front
from oscar_zoo.registry.card_table import CardRow, ReportFiles, escape, section
from oscar_zoo.registry.index import Index

BEGIN = b"<!-- oscar-zoo:begin -->"
END = b"<!-- oscar-zoo:end -->"
TITLE = "Rotations for 2-bit KV caches"


def update_card(card: bytes | None, old: Index, new: Index, *, hub: str) -> bytes:
    """The card that fits the index `new`.

    Returns:
        A whole new card where there was none, or one that nobody edited; else `card` with its
        section replaced or added, and with the metadata between the markers of its front matter
        replaced.
    """
    rows = _rows(new)
    if card is None or card == new_card(_rows(old), hub):
        return new_card(rows, hub)
    return card if is_damaged(card) else card_front.merged(merged_card(card, rows, hub), rows)


def merged_card(
    card: bytes, rows: Sequence[CardRow], where: str | None, report: ReportFiles | None = None
) -> bytes:
    """`card` with its section replaced, or added at the end. `card` itself where the markers of the
    section are damaged. The front matter stays as it is."""
    begin, end = card.find(BEGIN), card.find(END)
    made = _section(rows, where, report)
    if begin < 0 and end < 0:
        gap = b"" if not card else b"\n" if card.endswith(b"\n") else b"\n\n"
        return card + gap + made + b"\n"
    return card if is_damaged(card) else card[:begin] + made + card[end + len(END) :]


def is_damaged(card: bytes | None) -> bool:
    """Whether the markers of `card` do not enclose exactly one section."""
    if card is None or (BEGIN not in card and END not in card):
        return False
    return card.count(BEGIN) != 1 or card.count(END) != 1 or card.find(END) < card.find(BEGIN)


def new_card(
    rows: Sequence[CardRow],
    where: str | None,
    *,
    title: str = TITLE,
    report: ReportFiles | None = None,
) -> bytes:
    """A whole card.

    Args:
        report: of the only artifact, if it lies beside the card.
    """
    head = f"{card_front.whole(rows)}\n# {escape(title)}\n\n"
    return head.encode() + _section(rows, where, report) + b"\n"


def _section(
    rows: Sequence[CardRow], where: str | None, report: ReportFiles | None = None
) -> bytes:
    return b"\n".join([BEGIN, section(rows, where, report).encode(), END])


def _rows(index: Index) -> list[CardRow]:
    return [CardRow.of_index(entry) for entry in index.artifacts]
