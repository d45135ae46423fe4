"""One bounded JSON reader and one canonical writer.

Python's own reader accepts duplicate keys, NaN, 1e999, lone surrogates and endless nesting; this
one refuses them all. It reads manifests, indexes, locks and hub listings, which may all come from
other people.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from oscar_zoo.errors import MalformedFile

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_INT = 1 << 53
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A whole string, or a bracket outside of strings. A string may lack its end: the reader after it
says so."""

Json = Any
"""None, bool, int, float, str, list or dict with str keys."""


def loads(
    data: bytes, *, what: str = "JSON", max_bytes: int = MAX_BYTES, infinite: bool = False
) -> Json:
    if len(data) > max_bytes:
        raise MalformedFile(
            "json.size", f"{what} has {len(data)} bytes, at most {max_bytes} are read."
        )
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        raise MalformedFile("json.encoding", f"{what} is not UTF-8 (byte {error.start}).") from None
    if text.startswith("\ufeff"):
        raise MalformedFile("json.encoding", f"{what} starts with a byte-order mark.")
    _check_depth(text, what)
    try:
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: _unique(pairs, what),
            parse_constant=lambda name: _constant(name, what, infinite),
            parse_int=lambda digits: _integer(digits, what),
            parse_float=lambda digits: _float(digits, what),
        )
    except json.JSONDecodeError as error:
        message = f"{what} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        raise MalformedFile("json.syntax", message) from None
    _check_text(value, what)  # text outside of any object
    return value


def canonical_bytes(value: Json) -> bytes:
    """The only byte form of `value`: sorted keys, no spaces, UTF-8, no newline."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def pretty_bytes(value: Json) -> bytes:
    """The form for files people read: one space of indent, final newline."""
    return (
        json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    ).encode()


def _check_depth(text: str, what: str) -> None:
    depth = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise MalformedFile("json.depth", f"{what} nests deeper than {MAX_DEPTH} levels.")
        elif found[0] in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Json]], what: str) -> dict[str, Json]:
    result: dict[str, Json] = {}
    for key, value in pairs:
        if key in result:
            raise MalformedFile(
                "json.duplicate_key", f"{what} has the key {key[:80]!r} twice in one object."
            )
        for text in (key, value):
            _check_text(text, what)
        result[key] = value
    return result


def _check_text(value: Json, what: str) -> None:
    if type(value) is list:
        for item in value:
            _check_text(item, what)
    elif type(value) is str and any(0xD800 <= ord(c) <= 0xDFFF or c == "\0" for c in value):
        raise MalformedFile("json.encoding", f"{what} has text with a lone surrogate or a NUL.")


def _constant(name: str, what: str, infinite: bool) -> float:
    if infinite and name != "NaN":
        return float(name)
    raise MalformedFile("json.number", f"{what} has the number {name}.")


def _integer(digits: str, what: str) -> int:
    if len(digits) > 17 or abs(int(digits)) >= MAX_INT:
        raise MalformedFile("json.number", f"{what} has an integer of 2^53 or more.")
    return int(digits)


def _float(digits: str, what: str) -> float:
    value = float(digits)
    if len(digits) > 64 or not math.isfinite(value):
        raise MalformedFile("json.number", f"{what} has a number out of range.")
    return value
