"""From a parsed JSON value of somebody else to a frozen model that refuses unknown keys."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from oscar_zoo.errors import MalformedFile

M = TypeVar("M", bound=BaseModel)
LONGEST_PLACE = 120
"""Characters of the place of an error that a message has."""


def validated(kind: type[M], value: Any, *, code: str, what: str, hint: str | None = None) -> M:
    """The model `kind` of a plain value, such as `strict_json.loads` gives.

    Args:
        kind: a strict model; the value goes through JSON once more, because strict validation of
            Python values would refuse a list where a tuple is meant.
        code: `reason` of the error, such as `manifest.schema`.
    """
    try:
        return kind.model_validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))[:LONGEST_PLACE]
        cause = first["msg"].removeprefix("Value error, ").rstrip(".")
        said = f"{place}: {cause}" if place else cause
        raise MalformedFile(code, f"{what}: {said}.", hint=hint) from None
