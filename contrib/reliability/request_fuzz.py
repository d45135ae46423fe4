"""Requests of every shape, made by hypothesis from the schemas of SGLang's own request types.

A request begins as one that works. Some of its fields then get a value of their type, a value that
hurts, or a value of another type; some get fields that do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]
MOST_NEW = 4
"""Tokens of an answer: long answers find nothing more."""
TEXT = "The access code of Roso is"
MESSAGES = [{"role": "user", "content": TEXT}]
WORKING: dict[str, dict[str, Any]] = {
    "/generate": {"text": TEXT, "sampling_params": {}},
    "/v1/completions": {"model": "default", "prompt": TEXT},
    "/v1/chat/completions": {"model": "default", "messages": MESSAGES},
    "/tokenize": {"model": "default", "prompt": TEXT},
    "/detokenize": {"model": "default", "tokens": [5, 6, 7]},
    "/v1/messages": {"model": "default", "messages": MESSAGES, "max_tokens": 2},
}
WEIGHTS = {"/generate": 8, "/v1/completions": 3, "/v1/chat/completions": 3}
LENGTHS = ("max_new_tokens", "max_tokens", "max_completion_tokens")

SMALL = (-9, -2, -1, 0, 1, 2, 7, 64, 2047, 2048, 99999999)
LARGE = (-(2**63), -(2**31), 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 10**30)
WHOLE = st.sampled_from(SMALL + LARGE)
NUMBER = st.sampled_from([-1e308, -1.0, -1e-30, 0.0, 1e-30, 1e-7, 5e-6, 0.5, 1.0, 2.0, 1e9, 1e308])
TEXTS = ("", " ", "a", "\x00", "\n", "ä", "\U0001f600", "a" * 3000, "HEALTH_CHECK", "/etc/passwd")
PATTERNS = ("(", "(a+)+$", "a{1,999}", "[0-9]{1,3}", "root ::= root", 'root ::= "a"', "{", "[]")
JSONS = ("{}", '{"type": "object"}', '{"$ref": "#"}', '{"type": "x"}', "-1", "5", "99999999")
WORD = st.sampled_from(TEXTS + PATTERNS + JSONS)
TOKENS = st.lists(st.sampled_from([0, 5, 6, 7, 100, 2047, 2048, -1, 99999999]), max_size=6)
SCALAR = st.one_of(st.none(), st.booleans(), WHOLE, NUMBER, WORD)
ANYTHING = st.one_of(
    SCALAR,
    TOKENS,
    st.lists(TOKENS, max_size=3),
    st.lists(SCALAR, max_size=3),
    st.dictionaries(WORD, SCALAR, max_size=3),
    st.just([[[[[]]]]]),
)
"""Values of every type, hostile ones among them."""


def requests(schemas: Mapping[str, Schema]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """A path, and the JSON of a request to it.

    Args:
        schemas: by path, and of the sampling parameters; see `request_schemas`.
    """
    paths = [path for path in WORKING for _ in range(WEIGHTS.get(path, 1))]
    return st.sampled_from(paths).flatmap(lambda path: _request(path, schemas))


@st.composite
def _request(
    draw: st.DrawFn, path: str, schemas: Mapping[str, Schema]
) -> tuple[str, dict[str, Any]]:
    body = {**WORKING[path], **draw(_changes(schemas[path]))}
    if path == "/generate":
        if draw(st.booleans()):
            body.pop("text", None)
            body["input_ids"] = draw(st.one_of(TOKENS, st.lists(TOKENS, max_size=3)))
        if draw(st.booleans()):
            body["sampling_params"] = draw(_changes(schemas["sampling"]))
    _shorten(path, body)
    return path, body


def _changes(schema: Schema) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted(schema["properties"])
    field = st.sampled_from([*names, "no_such_field"])
    change = field.flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.one_of(_value(schema["properties"].get(name, {}), schema, 4), ANYTHING),
        )
    )
    return st.lists(change, min_size=1, max_size=4).map(dict)


def _value(node: Schema, root: Schema, depth: int) -> st.SearchStrategy[Any]:
    """A value of the type that a schema names."""
    if depth == 0:
        return st.none()
    if "$ref" in node:
        return _value(root["$defs"][node["$ref"].rpartition("/")[2]], root, depth - 1)
    if "enum" in node or "const" in node:
        return st.sampled_from(node.get("enum", [node.get("const")]))
    if "anyOf" in node:
        return st.one_of([_value(one, root, depth) for one in node["anyOf"]])
    kind = node.get("type")
    if kind == "array":
        return st.lists(_value(node.get("items", {}), root, depth - 1), max_size=3)
    if kind == "object" and node.get("properties"):
        values = {name: _value(one, root, depth - 1) for name, one in node["properties"].items()}
        needed = {name: values[name] for name in node.get("required", ()) if name in values}
        return st.fixed_dictionaries(
            needed, optional={name: one for name, one in values.items() if name not in needed}
        )
    simple = {
        "integer": WHOLE,
        "number": st.one_of(NUMBER, WHOLE),
        "string": WORD,
        "boolean": st.booleans(),
        "null": st.none(),
        "object": st.dictionaries(WORD, SCALAR, max_size=3),
    }
    return simple.get(str(kind), ANYTHING)


def _shorten(path: str, body: dict[str, Any]) -> None:
    """Make answers short, but leave lengths that are wrong."""
    places: list[Any] = [body]
    if path == "/generate":
        given = body.get("sampling_params")
        if given is None:
            given = body["sampling_params"] = {}
        places = given if isinstance(given, list) else [given]
    names = {"/generate": LENGTHS[:1]}
    for place in places:
        if not isinstance(place, dict):
            continue
        for name in names.get(path, LENGTHS[1:3]):
            value = place.get(name)
            good = type(value) is int and 0 <= value < 2**31
            if value is None or good:
                place[name] = min(value or 2, MOST_NEW) if good else 2
