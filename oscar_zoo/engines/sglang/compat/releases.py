"""Everything that the supported releases of SGLang call differently, one row per difference.

A new release needs its number in `TESTED`, and a row for every name that it moved; what clients may
ask it is in `front/access.py` and `bounds/`. Names are looked up in the installed code and not by
version, so that a release between two tested ones works too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from oscar_zoo.errors import MissingDependency, UnsupportedMachine

TESTED = ("0.5.17", "0.5.21", "0.5.23")
"""Releases that the tests run with; others from the first to the last are accepted."""
COUNTS_ALL_CPU_RANKS = (0, 5, 21)
"""From here on every rank of a CPU server needs cores of its own; before, those of one
tensor-parallel group share them with the other groups."""


@dataclass(frozen=True)
class Moved:
    """A name that changed."""

    since: str  # the first tested release with the new name
    old: str | None  # the name before, or `None` where earlier releases have nothing like it
    new: str  # the name since then

    def here(self, owner: Any) -> bool:
        """Whether `owner`, a class or an object of the installed release, has the new name."""
        return hasattr(owner, self.new)

    def name(self, owner: Any) -> str | None:
        return self.new if self.here(owner) else self.old


RESOLVE = Moved("0.5.21", "__post_init__", "resolve_once")
"""The method of `ServerArgs` that decides all arguments; an assignment after it raises."""
ALLOCATE_ROWS = Moved("0.5.21", "alloc", "alloc_rows")
"""The method of `ReqToTokenPool` that gives rows to requests. The new one hands out exactly the
rows that get a new owner; the old one also returns rows that requests keep."""
HOLDS_KV = Moved("0.5.21", None, "holds_kv")
"""The property of `Req.kv` that says whether a request keeps its row; before, a number of its row
says so."""
ATTENTION_DP = Moved("0.5.21", None, "attn_dp_size")
"""The field of a pool configurator with its data-parallel size; before, it is a field of `ps`."""
BACKEND_NAMES = Moved("0.5.21", None, "resolve_attention_backend_strs")
"""The function of `attention_backend_setup` whose names a model runner has before its backend is
built; before, these names are read from `ServerArgs`."""
CHECKPOINT_GRID = Moved("0.5.21", None, "mamba_checkpoint_grid")
"""The function of `runtime_context` with the tokens between places of a pass where a state can be
saved; before, such a place must be a multiple of a property of `ServerArgs` as well."""
RATIO_GIVEN = Moved("0.5.21", None, "_swa_full_tokens_ratio_explicitly_set")
"""The setting that says whether the user named a ratio of sliding slots to token slots; before,
another value than the default does."""
DRAFT_CACHE_TYPE = Moved("0.5.21", None, "speculative_draft_kv_cache_dtype")
"""The setting with the type of a draft model's cache; before, it is that of the target."""
LATENT_POOL = Moved("0.5.23", "MLATokenToKVPool", "mla_pool_class")
"""The argument of `_build_mla_kv_pool` with the class of the pool; before, it is a name of its
module."""
PREFIX = Moved("0.5.23", "prefix_indices", "prefix_len")
"""The field of `Req` with what the prefix cache has of it: slots before, a number of tokens
since."""


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])[:3]))


FIRST = _number(TESTED[0])
BEYOND = (*_number(TESTED[-1])[:2], _number(TESTED[-1])[2] + 1)
"""Supported versions: `FIRST <= version < BEYOND`, the release after the last tested one."""


def installed_from(first: tuple[int, ...]) -> bool:
    """Whether the installed sglang is `first` or later, as its metadata says."""
    try:
        return _number(version("sglang")) >= first
    except PackageNotFoundError:
        return False


def sglang_version() -> str:
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
