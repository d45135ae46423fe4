"""Hook on the drafts of n-grams of a model whose other layers verify chains alone."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang.fired_hooks import FIRED
from oscar_zoo.runtime.trees import longest_chains


def chains(result: Any, *_: Any, **__: Any) -> Any:
    """Keep one chain of the drafts of every request.

    SGLang's table gives several of them, whatever breadth it is asked for: one for each beginning
    that it knows, and zeros below the last token.
    """
    FIRED.add("chains")
    return longest_chains(*result)
