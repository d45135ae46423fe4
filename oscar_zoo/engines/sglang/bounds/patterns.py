"""Regular expressions and grammars of requests: sizes, and stop expressions that take too long.

A stop expression runs in the scheduler after every token, with Python's `re`, which can take for
ever. Grammars are compiled, on trial first (`grammars`).
"""

from __future__ import annotations

import json
import re
from re import _constants as opcodes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from oscar_zoo.engines.sglang.bounds.values import Check, shown

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
    """The most characters that `parts` match."""
    total = 0
    for what, value in parts:
        if what in ONE_CHARACTER:
            total += 1
        elif what is opcodes.AT:
            pass
        elif what is opcodes.SUBPATTERN:
            total += _longest(value[3])
        elif what is opcodes.BRANCH:
            total += max(map(_longest, value[1]))
        elif what in REPEATS:
            total += _longest_repeat(*value)
        else:
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


def grammar(value: Any) -> str | None:
    """A grammar in EBNF, or an expression that a whole answer must match. It is compiled; how long
    that may take is decided by `grammars`."""
    if not isinstance(value, str):
        return f"must be a string, and is {shown(value)}"
    if len(value) > MOST_GRAMMAR:
        return f"has {len(value)} characters, and at most {MOST_GRAMMAR} are allowed"
    return _surrogates(value)


def schema(value: Any) -> str | None:
    """A JSON schema, or another grammar that is JSON, as text."""
    if not isinstance(value, str):
        return f"must be JSON in a string, and is {shown(value)}"
    if len(value) > MOST_GRAMMAR:
        return f"has {len(value)} characters, and at most {MOST_GRAMMAR} are allowed"
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return "is no JSON"
    return _surrogates(value) or _in_schema(parsed, MOST_DEPTH)


def _in_schema(value: Any, depth: int) -> str | None:
    if depth == 0:
        return f"is nested deeper than {MOST_DEPTH} levels"
    if isinstance(value, dict):
        for key, inner in value.items():
            wrong = _text_in_schema(key, inner) or _in_schema(inner, depth - 1)
            if wrong is not None:
                return wrong
        return None
    if isinstance(value, list):
        return next(filter(None, (_in_schema(inner, depth - 1) for inner in value)), None)
    return None


TEXTS: dict[str, Check] = dict.fromkeys(("pattern", "regex", "ebnf", "grammar"), grammar)
"""Fields of a schema or a structural tag that hold another language."""


def _text_in_schema(key: str, inner: Any) -> str | None:
    if key not in TEXTS or not isinstance(inner, str):
        return None
    wrong = TEXTS[key](inner)
    return None if wrong is None else f"has a {key} that {wrong}"


def _surrogates(value: str) -> str | None:
    try:
        value.encode()
    except UnicodeEncodeError:
        return "holds half of a character (an unpaired surrogate)"
    return None
