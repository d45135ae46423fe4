"""What the text of an option or argument means, for those whose type click does not have."""

from __future__ import annotations

import math
from typing import Literal

from oscar_zoo.errors import UsageError
from oscar_zoo.serving.sizes import parse_memory as parse_memory


def parse_bits(text: str | None) -> float | Literal["auto"] | None:
    """The value of `--bits`, or `None` where the option was not given."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    wanted = "2 or 4 for all codes, a budget such as 2.75, or auto"
    return _real(text, "--bits", "a number of bits", wanted)


def parse_percent(text: str | None, option: str = "--max-loss") -> float | None:
    """The value of an option in percent, with or without the sign; `None` if it was not given."""
    if text is None:
        return None
    what = "a number in percent"
    return _real(text.removesuffix("%").strip(), option, what, f"{what} such as 0.1%")


def _real(text: str, option: str, what: str, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{option} {text!r} is not {what}.", hint=f"use {wanted}")
    return value
