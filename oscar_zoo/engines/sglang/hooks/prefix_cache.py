"""Hooks where SGLang looks up prefixes and where request rows change owner: they keep rings and
sinks consistent."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang import worker
from oscar_zoo.engines.sglang.compat import request_rows, state_checkpoints
from oscar_zoo.engines.sglang.fired_hooks import FIRED
from oscar_zoo.runtime.sink_blocks import SinkBlocks


def tail(result: int, tree: Any, request: Any = None) -> int | None:
    """A prefix hit ends `recent` tokens before the end of the prompt, so that prefill fills
    the ring. There is no hit if the block with the first tokens is gone.

    SGLang 0.5.23 passes the request that asks; for earlier releases `match` remembers it.
    """
    if "kv_dtype" not in FIRED or worker.served()[0].window_on_hit.value != "recompute":
        return None
    FIRED.add("tail")
    sinks = _sinks(request_rows.pool_beside(tree))
    if sinks is None:
        return max(int(result), worker.served()[0].recent.value)
    prompt = sinks.asking if request is None else request_rows.prompt(request, sinks.width)
    return max(int(result), sinks.reprefill_tail(prompt, request_rows.page_size(tree)))


def match(original: Any, self: Any, tree: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Remember the request whose prefix is looked up, and have a state saved where later prompts
    can use it. The next pass of a long prompt comes without a look into the prefix cache."""
    tree = kwargs.pop("tree_cache", tree)
    sinks = _sinks(request_rows.pool_beside(tree))
    if sinks is None:
        result = original(self, tree, *args, **kwargs)
        state_checkpoints.name_place(self)
        return result
    FIRED.add("match")
    sinks.asking = request_rows.prompt(self, sinks.width)
    try:
        result = original(self, tree, *args, **kwargs)
    finally:
        sinks.asking = None
    if worker.served()[0].window_on_hit.value == "recompute":
        state_checkpoints.save_early(self, tree, worker.served()[0].recent.value)
    return result


def alloc(original: Any, self: Any, request: Any) -> Any:
    """Tell the windows which rows have a new owner; see `window_store`."""
    hand_out = getattr(self, "oscar_hand_out", None)  # put there by our attention backend
    if hand_out is None:
        return original(self, request)
    FIRED.add("alloc")
    result, new_rows = request_rows.newly_allocated(original, self, request)
    hand_out(new_rows)
    return result


def admit(result: Any, self: Any, requests: Any) -> None:
    """Tell the sink blocks which tokens the new rows will hold."""
    sinks = _sinks(self)
    if sinks is not None and result is not None:
        FIRED.add("admit")
        sinks.admit(result, (request_rows.prompt(request, sinks.width) for request in requests))


def release(original: Any, self: Any, request: Any) -> Any:
    """Let the sinks of a request that has ended or was retracted be shared."""
    sinks = _sinks(self)
    if sinks is None:
        return original(self, request)
    FIRED.add("release")
    prompt = request_rows.prompt(request, sinks.width)
    result, rows = request_rows.freed(original, self, request)
    for row in rows:
        sinks.release(row, prompt)
    return result


def flush(_result: None, self: Any) -> None:
    """Forget all sink blocks when SGLang empties its prefix cache."""
    sinks = _sinks(self)
    if sinks is not None:
        FIRED.add("flush")
        sinks.flush()


def _sinks(rows: Any) -> SinkBlocks | None:
    """The sink blocks that our attention backend put beside a pool of request rows; `None` without
    an INT2 cache."""
    found: SinkBlocks | None = getattr(rows, "oscar_sinks", None)
    return found
