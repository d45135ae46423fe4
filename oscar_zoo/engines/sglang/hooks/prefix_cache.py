"""Hooks where prefixes are looked up and request rows change owner: what of rings and sinks still
holds."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang import worker
from oscar_zoo.engines.sglang.compat import request_rows
from oscar_zoo.engines.sglang.fired_hooks import FIRED
from oscar_zoo.runtime.sink_blocks import SinkBlocks


def tail(result: int, tree: Any, request: Any = None) -> int | None:
    """Hook 9: a prefix hit ends `recent` tokens before the end of the prompt, so that prefill fills
    the ring; there is none where the block with the first tokens is gone. 0.5.23 says who asks;
    before, hook 12 knows."""
    if "kv_dtype" not in FIRED or worker.served()[0].window_on_hit.value != "recompute":
        return None
    FIRED.add("tail")
    sinks = _sinks(request_rows.pool_beside(tree))
    if sinks is None:
        return max(int(result), worker.served()[0].recent.value)
    prompt = sinks.asking if request is None else request_rows.prompt(request, sinks.width)
    return max(int(result), sinks.tail(prompt, request_rows.page_size(tree)))


def match(original: Any, self: Any, tree: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Hook 12: whose prefix is being looked up. The rest of a prompt is continued without asking a
    prefix cache."""
    tree = kwargs.pop("tree_cache", tree)
    sinks = _sinks(request_rows.pool_beside(tree))
    if sinks is None:
        return original(self, tree, *args, **kwargs)
    FIRED.add("match")
    sinks.asking = request_rows.prompt(self, sinks.width)
    try:
        return original(self, tree, *args, **kwargs)
    finally:
        sinks.asking = None


def alloc(original: Any, self: Any, request: Any) -> Any:
    """Hook 10: rows with a new owner. It touches only a set on the host; see `window_store`."""
    hand_out = getattr(self, "oscar_hand_out", None)  # put there by our attention backend
    if hand_out is None:
        return original(self, request)
    FIRED.add("alloc")
    result, new_rows = request_rows.newly_allocated(original, self, request)
    hand_out(new_rows)
    return result


def admit(result: Any, self: Any, requests: Any) -> None:
    """Hook 10, for sinks: which tokens the rows will hold. Whether a row is new to its request,
    `alloc` tells."""
    sinks = _sinks(self)
    if sinks is not None and result is not None:
        FIRED.add("admit")
        sinks.expect(result, (request_rows.prompt(request, sinks.width) for request in requests))


def release(original: Any, self: Any, request: Any) -> Any:
    """Hook 11: a request is done with its row, or retracted; its sinks may be shared from now
    on."""
    sinks = _sinks(self)
    if sinks is None:
        return original(self, request)
    FIRED.add("release")
    prompt = request_rows.prompt(request, sinks.width)
    result, rows = request_rows.freed(original, self, request)
    for row in rows:
        sinks.free(row, prompt)
    return result


def flush(_result: None, self: Any) -> None:
    """Hook 11: the prefix cache and all rows are emptied."""
    sinks = _sinks(self)
    if sinks is not None:
        FIRED.add("flush")
        sinks.clear()


def _sinks(rows: Any) -> SinkBlocks | None:
    """Sink blocks of a pool of request rows, put there by our attention backend; `None` without an
    INT2 cache."""
    found: SinkBlocks | None = getattr(rows, "oscar_sinks", None)
    return found
