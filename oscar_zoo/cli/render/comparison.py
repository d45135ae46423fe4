"""What `compare` shows."""

from __future__ import annotations

from typing import Any

from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.score_file import both_text
from oscar_zoo.site.compare import Comparison
from oscar_zoo.site.params import CompareParams

_TAKES = {
    "bits_per_element": "bits per number",
    "token_bytes": "INT2 cache per token",
    "bytes": "size of the files",
}
_MADE = {
    "model": "model",
    "method": "method",
    "format_version": "format",
    "group_size": "group size",
    "clip_k": "clip of keys",
    "clip_v": "clip of values",
    "sink": "first tokens in BF16",
    "recent": "last tokens in BF16",
    "calibration": "calibration text",
    "calibration_tokens": "calibration tokens",
    "calibrated_on": "has questions of",
    "license": "licence",
    "state": "state",
    "accepted": "published although",
}
_LABELS = 28
"""Columns that the labels take, with the space between columns."""
_BYTES = ("token_bytes", "bytes")


def print_comparison(found: Comparison, params: CompareParams, *, quiet: bool) -> None:
    """A row for each fact that one of them has; a star marks those that differ."""
    first, second = found.entries
    one: Any
    two: Any
    one, two = found.facts
    table = terminal.table("", *map(terminal.clean, _heads(found.names)))
    rows = {
        name: (_figure(name, first), _figure(name, second)) for name in ("perplexity", "recall")
    }
    for task in dict.fromkeys((*first.claims, *second.claims)):
        if task not in rows:
            rows[task] = (_score(task, first), _score(task, second))
    for key, label in (_TAKES | _MADE).items():
        rows[label] = (_shown(key, one[key]), _shown(key, two[key]))
    rows["digest"] = (_digest(one), _digest(two))
    for label, cells in rows.items():
        if set(cells) != {terminal.NOT_REPORTED}:
            star = "*" if cells[0] != cells[1] else " "
            table.add_row(f"{star} {terminal.clean(label)}", *map(terminal.clean, cells))
    terminal.out().print(table)
    if any(facts["scores"] for facts in found.facts):
        terminal.prose("Who measured what, and how: oscar-zoo scores show NAME")
    for error in found.unreachable:
        terminal.note(f"note: {error.message}")


def _heads(names: tuple[str, str]) -> tuple[str, str]:
    """The names; numbers on a terminal that has no room for them, which first stand above."""
    if not terminal.is_narrow(_LABELS + len(names[0]) + len(names[1])):
        return names
    for number, name in enumerate(names, 1):
        terminal.labelled(f"{number}  ", name)
    return "1", "2"


def _shown(key: str, value: Any) -> str:
    if value is None or value == []:
        return "nothing" if key == "calibrated_on" else terminal.NOT_REPORTED
    if key in _BYTES:
        return terminal.gigabytes(value)
    if key == "calibration_tokens":
        return f"{value:,}"
    return ", ".join(value) if isinstance(value, list) else str(value or "none")


def _digest(facts: dict[str, Any]) -> str:
    return facts["digest"][:19] if facts["digest"] else terminal.NOT_REPORTED


def _figure(name: str, entry: Entry) -> str:
    return getattr(entry.measured, f"short_{name}", None) or terminal.NOT_REPORTED


def _score(task: str, entry: Entry) -> str:
    """BF16 and INT2 of the first report, which is a measured one where there is one."""
    score = entry.claims.get(task)
    if score is None:
        return terminal.NOT_REPORTED
    return f"{both_text(score, error=True)} ({score.reporter.replace('_', ' ')})"
