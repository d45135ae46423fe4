"""JSON from strangers: what is refused and why, and that what we write reads back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.artifact import strict_json
from oscar_zoo.errors import MalformedFile

REFUSED = {
    b"": "json.syntax",
    b"{": "json.syntax",
    b"{} x": "json.syntax",
    b"{'a':1}": "json.syntax",
    b"[1,]": "json.syntax",
    b'{"a":1,"a":1}': "json.duplicate_key",
    b'{"x":{"a":1,"b":2,"a":3}}': "json.duplicate_key",
    b'{"\\u0061":1,"a":2}': "json.duplicate_key",
    b"NaN": "json.number",
    b"[Infinity]": "json.number",
    b"-Infinity": "json.number",
    b"1e999": "json.number",
    b"9007199254740992": "json.number",
    b"-9007199254740992": "json.number",
    b"1" * 5000: "json.number",
    b"0." + b"1" * 5000: "json.number",
    b"\xef\xbb\xbf{}": "json.encoding",
    b"\xff\xfe{\0}\0": "json.encoding",
    b'"\xed\xa0\x80"': "json.encoding",
    b'{"a":"\\ud800"}': "json.encoding",
    b'{"a":"\\u0000"}': "json.encoding",
    b'{"\\ud800":1}': "json.encoding",
    b'{"a":["\\ud800"]}': "json.encoding",
    b'"\\ud800"': "json.encoding",
    b'[["\\u0000"]]': "json.encoding",
    b"[" * 17 + b"]" * 17: "json.depth",
    b"[" * 100_000: "json.depth",
    b'{"a":' * 17 + b"1" + b"}" * 17: "json.depth",
    b" " * ((1 << 20) + 1): "json.size",
}


@pytest.mark.parametrize("data", REFUSED, ids=lambda data: ascii(data[:24]))
def test_refused(data: bytes) -> None:
    with pytest.raises(MalformedFile) as caught:
        strict_json.loads(data)
    assert caught.value.reason == REFUSED[data]


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b" [1, 2.5, -3e2] ",
        b'"[[[[[[[[[[[[[[[[[[[["',
        b"9007199254740991",
        b'"\xc3\xa9\\u00e9\\n"',
        b"[" * 16 + b"]" * 16,
        b'"\\"["',
        b'{"a": "[[[[[[[[[[[[[[[[[[", "b": [1]}',
    ],
)
def test_accepted_as_python_reads_it(data: bytes) -> None:
    assert strict_json.loads(data) == json.loads(data)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(VALUES)
def test_what_we_write_reads_back(value: strict_json.Json) -> None:
    for form in (strict_json.canonical_bytes(value), strict_json.pretty_bytes(value)):
        again = strict_json.loads(form)
        assert again == value
        assert strict_json.canonical_bytes(again) == strict_json.canonical_bytes(value)


def test_the_canonical_form() -> None:
    assert (
        strict_json.canonical_bytes({"b": [1, "é"], "a": None}) == '{"a":null,"b":[1,"é"]}'.encode()
    )
    with pytest.raises(ValueError, match="JSON"):
        strict_json.canonical_bytes(float("nan"))
