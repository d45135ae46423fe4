"""What commands print with `--json`: read, and checked against the schemas in `docs/schemas`."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

SCHEMAS = Path(__file__).resolve().parents[2] / "docs/schemas"


def parsed(text: str) -> Any:
    """The one JSON object in `text`; it must name a schema of ours and keep to it."""
    value = json.loads(text)
    check(value)
    return value


def check(value: Any) -> None:
    """Raise `AssertionError` where `value` is not what its schema says."""
    name = re.fullmatch(r"oscar-zoo\.([a-z-]+)/([0-9]+)", value["schema"])
    assert name is not None, value["schema"]
    error = best_match(_validator(f"{name[1]}-{name[2]}").iter_errors(value))
    assert error is None, f"{value['schema']}: {error.json_path}: {error.message}"


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_bytes()))
