"""Which versions of SGLang are supported, and which one is installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from oscar_zoo.errors import MissingDependency, UnsupportedMachine

FIRST, BEYOND = (0, 5, 17), (0, 5, 24)
"""Supported versions: `FIRST <= version < BEYOND`."""


def sglang_version() -> str:
    """Version of the installed sglang.

    Raises:
        MissingDependency: it is not installed.
        UnsupportedMachine: it is not a version this plugin was tested with.
    """
    try:
        text = version("sglang")
    except PackageNotFoundError:
        raise MissingDependency.for_extra("sglang", "serve") from None
    number = tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])[:3]))
    if not FIRST <= number < BEYOND:
        first, beyond = (".".join(map(str, v)) for v in (FIRST, BEYOND))
        raise UnsupportedMachine(
            f"sglang {text} is outside the supported range >={first},<{beyond}.",
            hint=f"pip install 'sglang>={first},<{beyond}'",
        )
    return text
