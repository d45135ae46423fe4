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
    try:
        return _loads(data, max_bytes, infinite)
    except MalformedFile as error:
        raise MalformedFile(error.reason, f"{what} {error.message}.") from None


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


def _loads(data: bytes, max_bytes: int, infinite: bool) -> Json:
    if len(data) > max_bytes:
        raise MalformedFile("json.size", f"has {len(data)} bytes, at most {max_bytes} are read")
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        raise MalformedFile("json.encoding", f"is not UTF-8 (byte {error.start})") from None
    if text.startswith("\ufeff"):
        raise MalformedFile("json.encoding", "starts with a byte-order mark")
    _check_depth(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=lambda name: _number(name, infinite=infinite),
            parse_int=_integer,
            parse_float=_number,
        )
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise MalformedFile("json.syntax", f"is not JSON: {error.msg} at {place}") from None
    _check_text(value)  # text outside of any object
    return value


def _check_depth(text: str) -> None:
    depth = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise MalformedFile("json.depth", f"nests deeper than {MAX_DEPTH} levels")
        elif found[0] in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result: dict[str, Json] = {}
    for key, value in pairs:
        if key in result:
            message = f"has the key {key[:80]!r} twice in one object"
            raise MalformedFile("json.duplicate_key", message)
        for text in (key, value):
            _check_text(text)
        result[key] = value
    return result


def _check_text(value: Json) -> None:
    if type(value) is list:
        for item in value:
            _check_text(item)
    elif type(value) is str and any(0xD800 <= ord(c) <= 0xDFFF or c == "\0" for c in value):
        raise MalformedFile("json.encoding", "has text with a lone surrogate or a NUL")


def _integer(digits: str) -> int:
    if len(digits) > 17 or abs(int(digits)) >= MAX_INT:
        raise MalformedFile("json.number", "has an integer of 2^53 or more")
    return int(digits)


def _number(digits: str, *, infinite: bool = False) -> float:
    value = float(digits)
    allowed = math.isfinite(value) or (infinite and not math.isnan(value))
    if len(digits) > 64 or not allowed:
        raise MalformedFile("json.number", f"has the number {digits[:64]}, which is out of range")
    return value
