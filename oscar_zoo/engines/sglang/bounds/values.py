"""Checks of single values: a check takes a value and returns what is wrong with it, or `None`.

`None` as a value means that a request leaves a field out, so no check sees it. A stop expression
runs in the scheduler after every token, with Python's `re`, which can take for ever, so only quick
ones pass. Grammars are compiled, on trial first (`grammars`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from re import _constants as opcodes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Check = Callable[[Any], str | None]

INT64 = 2**63 - 1
MOST_NAME = 512
SHOWN = 40
MOST_STOP = 256
"""Bytes of a stop expression, and characters that it may match."""
MOST_OPEN = 2
"""Repetitions of a stop expression whose number is not fixed: more take too many steps."""
MOST_GRAMMAR = 1 << 16
"""Characters of a schema or a grammar."""
MOST_DEPTH = 32
"""Levels of a schema."""
ONE_CHARACTER = (opcodes.LITERAL, opcodes.NOT_LITERAL, opcodes.IN, opcodes.ANY)
REPEATS = (opcodes.MAX_REPEAT, opcodes.MIN_REPEAT, opcodes.POSSESSIVE_REPEAT)
OTHER_LANGUAGES = frozenset(("pattern", "regex", "ebnf", "grammar"))
"""Fields of a schema or a structural tag that hold a grammar."""


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
    low = f"above {least:g} and at most" if above else f"from {least:g} to"

    def check(value: Any) -> str | None:
        inside = type(value) in (int, float) and least <= value <= most  # what is no number is not
        if inside and not (above and value == least):
            return None
        return f"must be a number {low} {most:g}, and is {shown(value)}"

    return check


def flag(value: Any) -> str | None:
    return None if type(value) is bool else f"must be true or false, and is {shown(value)}"


def text(most: int) -> Check:

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
    listed = ", ".join(map(str, allowed))

    def check(value: Any) -> str | None:
        known = any(type(value) is type(one) and value == one for one in allowed)
        return None if known else f"must be one of {listed}, and is {shown(value)}"

    return check


def sequence(check: Check, most: int) -> Check:

    def check_all(value: Any) -> str | None:
        if not isinstance(value, list | tuple | set | frozenset):
            return f"must be a list, and is {shown(value)}"
        return _each(value, check, most)

    return check_all


def one_or_more(check: Check, most: int) -> Check:
    return lambda value: _each(value, check, most) if isinstance(value, list) else check(value)


def mapping(keys: Check, values: Check, most: int) -> Check:

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"must be an object, and is {shown(value)}"
        if len(value) > most:
            return f"has {len(value)} entries, and at most {most} are allowed"
        wrong = ((key, keys(key) or values(item)) for key, item in value.items())
        return next((f"has an entry {shown(key)} that {why}" for key, why in wrong if why), None)

    return check


def _each(values: Collection[Any], check: Check, most: int) -> str | None:
    if len(values) > most:
        return f"has {len(values)} entries, and at most {most} are allowed"
    wrong = ("must not be null" if value is None else check(value) for value in values)
    return next((f"has an entry that {why}" for why in wrong if why), None)


def token_ids(ids: Collection[int], vocabulary: int) -> str | None:
    """Token ids of a model with `vocabulary` tokens. Prompts are long, so the good case is fast."""
    if not ids:
        return None
    if set(map(type, ids)) == {int}:
        if min(ids) >= 0 and max(ids) < vocabulary:
            return None
        wrong = next(one for one in ids if not 0 <= one < vocabulary)
        return f"holds token {wrong}, and this model has the tokens 0 to {vocabulary - 1}"
    wrong_type = next(one for one in ids if type(one) is not int)
    return f"must hold token ids, and holds {shown(wrong_type)}"


def shown(value: Any) -> str:
    if isinstance(value, list | tuple | set | dict) and len(value) > 3:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        said = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a deep list
        said = f"a {type(value).__name__}"
    return said if len(said) <= SHOWN else said[: SHOWN - 3] + "..."


def stop_pattern(value: Any) -> str | None:
    """An expression that ends an answer: short, of bounded length, and quick on any text."""
    if not isinstance(value, str):
        return f"must be a string, and is {shown(value)}"
    if len(value.encode("utf-8", "surrogatepass")) > MOST_STOP:
        return f"has more than {MOST_STOP} bytes"
    try:
        parsed = parser.parse(value)
        longest = _longest(parsed)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is no regular expression: {error}"
    except _Slow as slow:
        return str(slow)
    if longest > MOST_STOP:
        return f"matches up to {longest} characters, and at most {MOST_STOP} are allowed"
    if _open_repeats(parsed) > MOST_OPEN:
        return f"has more than {MOST_OPEN} repetitions without a fixed number"
    return None


class _Slow(Exception):
    """A part of an expression that can take too long; the message says which."""


def _longest(parts: Any) -> int:
    total = 0
    for what, value in parts:
        if what in ONE_CHARACTER:
            total += 1
        elif what is opcodes.SUBPATTERN:
            total += _longest(value[3])
        elif what is opcodes.BRANCH:
            total += max(map(_longest, value[1]))
        elif what in REPEATS:
            total += _longest_repeat(*value)
        elif what is not opcodes.AT:
            name = str(what).lower()
            raise _Slow(f"holds what takes too long ({name}); use characters, classes and {{m,n}}")
    return total


def _longest_repeat(least: int, most: Any, inner: Any) -> int:
    if most is opcodes.MAXREPEAT:
        raise _Slow("repeats without an end; write {1,20} in place of + and *")
    if least != most and not (len(inner) == 1 and inner[0][0] in ONE_CHARACTER):
        raise _Slow("repeats more than one character or class, which can take too long")
    return int(most) * _longest(inner)


def _open_repeats(parts: Any) -> int:
    found = 0
    for what, value in parts:
        if what is opcodes.SUBPATTERN:
            found += _open_repeats(value[3])
        elif what is opcodes.BRANCH:
            found += sum(map(_open_repeats, value[1]))
        elif what in REPEATS:
            found += (value[0] != value[1]) + int(value[1]) * _open_repeats(value[2])
    return found


grammar = text(MOST_GRAMMAR)
"""A grammar in EBNF, or an expression that a whole answer must match. How long it takes to compile
is decided by `grammars`."""


def schema(value: Any) -> str | None:
    """A JSON schema, or another grammar that is JSON, as text."""
    if not isinstance(value, str):
        return f"must be JSON in a string, and is {shown(value)}"
    if len(value) > MOST_GRAMMAR:
        return grammar(value)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return "is no JSON"
    return grammar(value) or _in_schema(parsed, MOST_DEPTH)


def _in_schema(value: Any, depth: int) -> str | None:
    if depth == 0:
        return f"is nested deeper than {MOST_DEPTH} levels"
    lists = enumerate(value) if isinstance(value, list) else ()
    for key, inner in value.items() if isinstance(value, dict) else lists:
        wrong = grammar(inner) if key in OTHER_LANGUAGES and isinstance(inner, str) else None
        if wrong is not None:
            return f"has a {key} that {wrong}"
        wrong = _in_schema(inner, depth - 1)
        if wrong is not None:
            return wrong
    return None
