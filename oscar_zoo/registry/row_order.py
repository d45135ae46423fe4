"""Choosing and ordering the rows of `registry.summary`. Imports no library, so that the help of the
command line can name the orders and the keys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

from oscar_zoo.errors import UsageError

Row = Mapping[str, Any]


def gpqa(row: Row) -> Mapping[str, Any] | None:
    """The score of GPQA with an INT2 cache under the recipe that a list shows: what was measured,
    before what others say. `None` where nobody reports a value."""
    for score in row["scores"]:
        of_recipe = score["kv_dtype"] == "int2" and not score["recipe_changes"]
        named = score["task"].casefold().startswith("gpqa")
        if named and of_recipe and score["value"] is not None:
            found: Mapping[str, Any] = score
            return found
    return None


def _gpqa_value(row: Row) -> float | None:
    score = gpqa(row)
    return None if score is None else score["value"]


def _figure(name: str) -> Callable[[Row], float | None]:
    return lambda row: row["measured"][name] if row["measured"] else None


_ORDERS: Mapping[str, tuple[Callable[[Row], Any], bool]] = {
    "name": (lambda row: str(row["id"]).casefold(), False),
    "gpqa": (_gpqa_value, True),
    "perplexity": (_figure("change_percent"), False),
    "recall": (_figure("recall"), True),
    "size": (lambda row: row["bytes"], False),
}
"""Name of an order -> what it looks at, and whether the largest comes first."""
SORTS = tuple(_ORDERS)
_KEYS: Mapping[str, str] = {
    "model": "model",
    "tag": "tag",
    "family": "family",
    "method": "method",
    "format": "format_version",
    "bits": "bits_per_element",
    "status": "status",
    "state": "state",
}
"""Key of a filter -> key of the rows."""
FILTERS = tuple(_KEYS)


@dataclass(frozen=True)
class RowChoice:
    """Which rows are shown, and in which order.

    Attributes:
        filters: pairs of a key of `FILTERS` and a pattern without capitals.
        order: one of `SORTS`.
    """

    filters: tuple[tuple[str, str], ...] = ()
    order: str = "name"

    @classmethod
    def parse(cls, filters: Sequence[str], order: str) -> Self:
        """Read what a user wrote.

        Args:
            filters: each `KEY=PATTERN`. In a pattern, `*` stands for any text, `?` for one
                character and `[ab]` for one of these. Case does not matter.
            order: one of `SORTS`.
        """
        if order not in _ORDERS:
            raise UsageError(f"there is no order {order!r}.", hint=f"orders are {', '.join(SORTS)}")
        return cls(tuple(_parsed(text) for text in filters), order)

    def of(self, rows: Iterable[Row]) -> list[Row]:
        """The rows that fit every filter, the best first; those without the value of the order come
        last, as they came."""
        fitting = [row for row in rows if all(_fits(row[_KEYS[k]], p) for k, p in self.filters)]
        look, largest_first = _ORDERS[self.order]
        known = [row for row in fitting if look(row) is not None]
        unknown = [row for row in fitting if look(row) is None]
        return [*sorted(known, key=look, reverse=largest_first), *unknown]


def _parsed(text: str) -> tuple[str, str]:
    key, equals, pattern = text.partition("=")
    key = key.strip().casefold()
    if not equals or not pattern.strip():
        raise UsageError(f"--filter {text!r} is not KEY=PATTERN.", hint=_EXAMPLE)
    if key not in _KEYS:
        close = difflib.get_close_matches(key, _KEYS, n=1)
        keys = None if close else f"keys are {', '.join(FILTERS)}"
        raise UsageError(f"--filter has no key {key!r}.", suggestions=close, hint=keys)
    if pattern.count("[") != pattern.count("]"):
        raise UsageError(f"the pattern {pattern!r} has a [ or ] without the other.", hint=_EXAMPLE)
    return key, pattern.strip().casefold()


_EXAMPLE = f"write, for example, --filter family='Qwen3*'; keys are {', '.join(FILTERS)}"


def _fits(value: str | float | None, pattern: str) -> bool:
    if value is None:
        return False
    text = value if isinstance(value, str) else f"{value:g}"
    return fnmatchcase(text.casefold(), pattern)
