"""Hooks where SGLang looks up prefixes and where request rows change owner: they keep rings and
sinks consistent."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang import worker
from oscar_zoo.engines.sglang.compat import scheduling
from oscar_zoo.engines.sglang.worker import FIRED
from oscar_zoo.runtime.sink_blocks import SinkBlocks


def tail(result: int, tree: Any, request: Any = None) -> int | None:
    """A prefix hit ends `recent` tokens before the end of the prompt, so that prefill fills
    the ring, or further on where the ring of a request that has ended has the others. There is no
    hit if the block with the first tokens is gone.

    SGLang 0.5.23 passes the request that asks; for earlier releases `match` remembers it.
    """
    if "kv_dtype" not in FIRED or not worker.kept_by_hits():
        return None
    FIRED.add("tail")
    rows = scheduling.pool_beside(tree)
    sinks = _sinks(rows)
    if sinks is None:
        return max(int(result), worker.kept_by_hits())
    prompt = sinks.asking if request is None else scheduling.prompt(request, sinks.width)
    ring = rows.oscar_rings.chosen if sinks.asking is not None else None
    left = None if ring is None or prompt is None else prompt.length - ring.end
    return max(int(result), sinks.reprefill_tail(prompt, scheduling.page_size(tree), left))


def match(original: Any, self: Any, tree: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Remember the request whose prefix is looked up, and have a state saved where later prompts
    can use it. The next pass of a long prompt comes without a look into the prefix cache."""
    tree = kwargs.pop("tree_cache", tree)
    rows = scheduling.pool_beside(tree)
    sinks = _sinks(rows)
    if sinks is None:
        result = original(self, tree, *args, **kwargs)
        scheduling.name_place(self)
        return result
    FIRED.add("match")
    sinks.asking = scheduling.prompt(self, sinks.width)
    rings = rows.oscar_rings
    self.oscar_ring = rings.chosen = rings.choose(sinks.asking.scope, scheduling.tokens(self))
    try:
        result = original(self, tree, *args, **kwargs)
    finally:
        sinks.asking = rings.chosen = None
    if worker.kept_by_hits():
        scheduling.save_early(self, tree, worker.kept_by_hits())
    return result


def alloc(original: Any, self: Any, request: Any) -> Any:
    """Tell the windows which rows have a new owner; see `stores`."""
    hand_out = getattr(self, "oscar_hand_out", None)  # put there by our attention backend
    if hand_out is None:
        return original(self, request)
    FIRED.add("alloc")
    result, new_rows = scheduling.newly_allocated(original, self, request)
    hand_out(new_rows)
    return result


def admit(result: Any, self: Any, requests: Any) -> None:
    """Tell the sink blocks which tokens the new rows will hold, and the rings which of them their
    requests chose."""
    sinks = _sinks(self)
    if sinks is not None and result is not None:
        FIRED.add("admit")
        sinks.admit(result, (scheduling.prompt(request, sinks.width) for request in requests))
        for row, request in zip(result, requests, strict=True):
            ring, length = getattr(request, "oscar_ring", None), scheduling.all_tokens(request)
            self.oscar_rings.expect(row, ring, length)


def release(original: Any, self: Any, request: Any) -> Any:
    """Let the sinks and the ring of a request that has ended or was retracted be shared."""
    sinks = _sinks(self)
    if sinks is None:
        return original(self, request)
    FIRED.add("release")
    prompt = scheduling.prompt(request, sinks.width)
    result, rows = scheduling.freed(original, self, request)
    for row in rows:
        sinks.release(row, prompt)
        if "match" in FIRED:  # else nobody asks for a ring
            self.oscar_rings.ended(row, prompt.scope, *scheduling.asked_and_said(request))
    return result


def flush(_result: None, self: Any) -> None:
    sinks = _sinks(self)
    if sinks is not None:
        FIRED.add("flush")
        sinks.flush()
        self.oscar_rings.flush()


def _sinks(rows: Any) -> SinkBlocks | None:
    found: SinkBlocks | None = getattr(rows, "oscar_sinks", None)
    return found
