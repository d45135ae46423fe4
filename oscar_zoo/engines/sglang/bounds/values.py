"""Checks of single values: a check takes a value and returns what is wrong with it, or `None`.

`None` as a value means that a request leaves a field out, so no check sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

Check = Callable[[Any], str | None]

INT64 = 2**63 - 1
MOST_NAME = 512
"""Characters of an identifier, such as the id of a request."""
SHOWN = 40
"""Characters of a value that a message shows."""


def whole(least: int, most: int, *also: int) -> Check:
    """An integer from `least` to `most`, or one of `also`."""
    others = "".join(f"{value} or " for value in also)

    def check(value: Any) -> str | None:
        if type(value) is int and (least <= value <= most or value in also):
            return None
        return f"must be {others}a whole number from {least} to {most}, and is {shown(value)}"

    return check


def number(least: float, most: float, *, above: bool = False) -> Check:
    """A finite number from `least` to `most`; `above` leaves `least` itself out."""

    def check(value: Any) -> str | None:
        if (
            type(value) in (int, float)
            and least <= value <= most
            and not (above and value == least)
        ):
            return None  # a value that is not a number lies nowhere
        low = f"above {least:g} and at most" if above else f"from {least:g} to"
        return f"must be a number {low} {most:g}, and is {shown(value)}"

    return check


def flag(value: Any) -> str | None:
    """`true` or `false`."""
    return None if type(value) is bool else f"must be true or false, and is {shown(value)}"


def text(most: int) -> Check:
    """A string of at most `most` characters that can be written as UTF-8."""

    def check(value: Any) -> str | None:
        if not isinstance(value, str):
            return f"must be a string, and is {shown(value)}"
        if len(value) > most:
            return f"has {len(value)} characters, and at most {most} are allowed"
        try:
            value.encode()
        except UnicodeEncodeError:
            return "holds half of a character (an unpaired surrogate)"
        return None

    return check


def word(*allowed: Any) -> Check:
    """One of a few values."""
    listed = ", ".join(map(str, allowed))

    def check(value: Any) -> str | None:
        known = any(type(value) is type(one) and value == one for one in allowed)
        return None if known else f"must be one of {listed}, and is {shown(value)}"

    return check


def sequence(check: Check, most: int) -> Check:
    """A list of at most `most` values."""

    def check_all(value: Any) -> str | None:
        if not isinstance(value, list | tuple | set | frozenset):
            return f"must be a list, and is {shown(value)}"
        return _each(value, check, most)

    return check_all


def one_or_more(check: Check, most: int) -> Check:
    """One value, or a list of at most `most` of them."""
    return lambda value: _each(value, check, most) if isinstance(value, list) else check(value)


def mapping(keys: Check, values: Check, most: int) -> Check:
    """An object of at most `most` entries."""

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"must be an object, and is {shown(value)}"
        if len(value) > most:
            return f"has {len(value)} entries, and at most {most} are allowed"
        for key, item in value.items():
            wrong = keys(key) or values(item)
            if wrong is not None:
                return f"has an entry {shown(key)} that {wrong}"
        return None

    return check


def token_ids(ids: Collection[int], vocabulary: int) -> str | None:
    """Token ids of a model with `vocabulary` tokens. Prompts are long, so the good case is fast."""
    if not ids:
        return None
    if _whole_only(ids):
        if min(ids) >= 0 and max(ids) < vocabulary:
            return None
        wrong = next(one for one in ids if not 0 <= one < vocabulary)
        return f"holds token {wrong}, and this model has the tokens 0 to {vocabulary - 1}"
    wrong_type = next(one for one in ids if type(one) is not int)
    return f"must hold token ids, and holds {shown(wrong_type)}"


def shown(value: Any) -> str:
    """A value for a message: short, and in one line."""
    if isinstance(value, list | tuple | set | dict) and len(value) > 3:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        said = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a deep list
        said = f"a {type(value).__name__}"
    return said if len(said) <= SHOWN else said[: SHOWN - 3] + "..."


def _whole_only(ids: Collection[Any]) -> bool:
    return set(map(type, ids)) == {int}


def _each(values: Collection[Any], check: Check, most: int) -> str | None:
    if len(values) > most:
        return f"has {len(values)} entries, and at most {most} are allowed"
    for value in values:
        wrong = "must not be null" if value is None else check(value)
        if wrong is not None:
            return f"has an entry that {wrong}"
    return None
