"""Flags that the installed SGLang does not know, refused before it is imported.

What is known is more than SGLang's parser takes (`installed_flags`), so no flag that SGLang accepts
is refused.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Set
from importlib.metadata import PackageNotFoundError, version

from oscar_zoo.engines.sglang.launch.denied_flags import is_denied
from oscar_zoo.engines.sglang.launch.installed_flags import (
    FEWEST,
    FLAG,
    installed_flags,
    is_taken,
)
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.errors import FlagRefused, UsageError

CLOSE = 0.75
"""How similar a flag must be to be suggested, as `difflib` measures it."""


def check_known(flags: UserFlags) -> None:
    """Refuse a flag that SGLang's parser would not take, abbreviations included.

    Nothing is refused where SGLang is not installed, or where its source cannot be read.
    """
    known: Set[str] = frozenset()
    for flag in flags.given:
        if not FLAG.fullmatch(flag.name):
            continue  # a value, such as a sentence that begins with hyphens
        known = known or installed_flags()
        if len(known) < FEWEST:
            return
        if not is_taken(flag.name, known):
            raise _unknown(flag.name, known)


def _can_be_given(flag: str) -> bool:
    return FLAG.fullmatch(flag) is not None and not is_denied(flag)


def _short(known: Set[str]) -> Set[str]:
    """Whole words at the beginning of one flag only, which SGLang's parser takes for it: `--tp` for
    `--tp-size`."""
    words = (flag.split("-") for flag in known)
    beginnings = Counter("-".join(part[:end]) for part in words for end in range(3, len(part)))
    return {
        one
        for one, times in beginnings.items()
        if times == 1 and sum(flag.startswith(one) for flag in known) == 1
    }


def _unknown(flag: str, known: Set[str]) -> UsageError:
    allowed = sorted(one for one in known | _short(known) if _can_be_given(one))
    close = difflib.get_close_matches(flag, allowed, n=1, cutoff=CLOSE)
    try:
        release = f"SGLang {version('sglang')}"
    except PackageNotFoundError:
        release = "the installed SGLang"
    return FlagRefused(
        f"{release} has no flag {flag}.",
        hint=(
            f"did you mean {close[0]}?"
            if close
            else "see its flags: python -P -m sglang.launch_server --help"
        ),
    )
