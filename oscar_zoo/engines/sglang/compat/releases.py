"""Everything that the supported releases of SGLang call differently, one row per difference.

A new release needs its number in `TESTED`, and a row for every name that it moved; what clients may
ask it is in `front/routes.py` and `bounds/`. Names are looked up in the installed code and not by
version, so that a release between two tested ones works too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TESTED = ("0.5.17", "0.5.21", "0.5.23")
"""Releases that the tests run with; others from the first to the last are accepted."""


@dataclass(frozen=True)
class Moved:
    """A name that changed.

    Attributes:
        since: the first tested release with the new name.
        old: the name before, or `None` where earlier releases have nothing like it.
        new: the name since then.
    """

    since: str
    old: str | None
    new: str

    def here(self, owner: Any) -> bool:
        """Whether `owner`, a class or an object of the installed release, has the new name."""
        return hasattr(owner, self.new)

    def name(self, owner: Any) -> str | None:
        """The name that `owner` has."""
        return self.new if self.here(owner) else self.old


RESOLVE = Moved("0.5.21", "__post_init__", "resolve_once")
"""The method of `ServerArgs` that decides all arguments; an assignment after it raises."""
ALLOCATE_ROWS = Moved("0.5.21", "alloc", "alloc_rows")
"""The method of `ReqToTokenPool` that gives rows to requests. The new one hands out exactly the
rows that get a new owner; the old one also returns rows that requests keep."""
BEAM_WIDTH = Moved("0.5.21", None, "beam_width")
"""The field of `SamplingParams` that asks for a beam search."""
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
PREFIX = Moved("0.5.23", "prefix_indices", "prefix_len")
"""The field of `Req` with what the prefix cache has of it: slots before, a number of tokens
since."""
