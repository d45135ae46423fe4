"""Which versions of SGLang are supported, and which one is installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from oscar_zoo.engines.sglang.compat.releases import TESTED
from oscar_zoo.errors import MissingDependency, UnsupportedMachine


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])[:3]))


FIRST = _number(TESTED[0])
BEYOND = (*_number(TESTED[-1])[:2], _number(TESTED[-1])[2] + 1)
"""Supported versions: `FIRST <= version < BEYOND`, the release after the last tested one."""

COUNTS_ALL_CPU_RANKS = (0, 5, 21)
"""From here on every rank of a CPU server needs cores of its own; before, those of one
tensor-parallel group share them with the other groups."""


def installed_from(first: tuple[int, ...]) -> bool:
    """Whether the installed sglang is `first` or later, as its metadata says."""
    try:
        return _number(version("sglang")) >= first
    except PackageNotFoundError:
        return False


def sglang_version() -> str:
    """Version of the installed sglang."""
    try:
        text = version("sglang")
    except PackageNotFoundError:
        raise MissingDependency.for_extra("sglang", "serve") from None
    if not FIRST <= _number(text) < BEYOND:
        first, beyond = (".".join(map(str, v)) for v in (FIRST, BEYOND))
        raise UnsupportedMachine(
            f"sglang {text} is outside the supported range >={first},<{beyond}.",
            hint=f"pip install 'sglang>={first},<{beyond}'",
        )
    return text
