"""A scheduler of SGLang: its model runner, its part of `/server_info` and of metrics; requests, the
rows of its slot table that they own, and the prefix cache beside it.

With states, a prefix hit ends at a saved one. SGLang saves the last one it can, near the end of the
prompt. A hit that leaves the recent window to prefill must end earlier, so it would fall back to a
much older state, or to none: so one is saved early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.runtime.sink_blocks import PromptKey


def model_runner(scheduler: Any) -> Any:
    return scheduler.tp_worker.model_runner


def metrics_collector(reporter: Any) -> Any | None:
    """SGLang's own metrics of a scheduler process; `None` if it exports nothing, as without
    `--enable-metrics` or on other ranks."""
    return reporter.metrics_collector if reporter.current_scheduler_metrics_enabled else None


def metric_classes(collector: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Gauges and counters that write where SGLang's `/metrics` reads."""
    # SGLang imports it late too, after it has chosen the folder that all processes write to.
    from prometheus_client import Counter, Gauge

    return collector._gauge_cls or Gauge, collector._counter_cls or Counter


def newly_allocated(original: Callable[..., Any], pool: Any, request: Any) -> tuple[Any, list[int]]:
    """Call SGLang's row allocator; return its result, and the rows that got a new owner. Where
    SGLang has no `releases.ALLOCATE_ROWS`, only the generation counter tells which rows these are.
    It is compared over this one call, because `clear` sets it to zero."""
    if releases.ALLOCATE_ROWS.here(pool):
        rows = original(pool, request)
        return rows, list(rows or ())
    before = pool.req_generation.clone()
    rows = original(pool, request)
    return rows, (
        pool.req_generation != before
    ).nonzero().flatten().tolist() if rows is not None else []


def freed(original: Callable[..., Any], pool: Any, request: Any) -> tuple[Any, list[int]]:
    """Let SGLang free the row of a request; return its result, and the rows that became free.
    SGLang adds them at the end of its list. Where it also takes rows from there, they are moved to
    the other end, so that the row that has been free for longest is taken first."""
    free = pool.free_slots
    before = len(free)
    result, rows = original(pool, request), list(free[before:])
    if rows and releases.ALLOCATE_ROWS.here(pool):
        del free[before:]
        free[:0] = rows
    return result, rows


def prompt(request: Any, width: int) -> PromptKey:
    """What the tokens of a request, prompt and answer, say about its first `width`.

    SGLang puts the id of a LoRA adapter into the extra key, and up to 0.5.17 the salt of the cache;
    named here too, so that nothing depends on that. Placeholders of images are hashes of their
    content. Tokens that stand for embeddings of the caller say nothing.
    """
    asked, answered = request.origin_input_ids, request.output_ids
    ids = tuple(asked[:width])
    ids += tuple(answered[: width - len(ids)])
    names = ("extra_key", "lora_id", "cache_salt")
    opaque = any(
        getattr(request, name, None) is not None
        for name in ("input_embeds", "positional_embed_overrides")
    )
    scope = None if opaque else tuple(getattr(request, name, None) for name in names)
    return PromptKey(scope, ids, len(asked) + len(answered))


def asked_and_said(request: Any) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens of a request: those of its prompt, and those of its answer so far."""
    return request.origin_input_ids, request.output_ids


def tokens(request: Any) -> Sequence[int]:
    asked, said = asked_and_said(request)
    return [*asked, *said] if said else asked


def new_requests(requests: Any) -> Iterator[tuple[int, int]]:
    """Tokens in all and cached tokens of every request that is about to get a row. Requests that
    keep their row are skipped."""
    for request in requests:
        kv: Any = getattr(request, "kv", None)
        keeps = kv.holds_kv if releases.HOLDS_KV.here(kv) else request.req_pool_idx is not None
        if not keeps:
            yield all_tokens(request), cached_tokens(request)


def all_tokens(request: Any) -> int:
    return len(request.origin_input_ids) + len(request.output_ids)


def cached_tokens(request: Any) -> int:
    if releases.PREFIX.here(request):
        return int(request.prefix_len)
    return len(request.prefix_indices)


def pool_beside(tree: Any) -> Any:
    return getattr(tree, "req_to_token_pool", None)


def page_size(tree: Any) -> int:
    """Tokens of a page; hits of a prefix cache end at multiples of it."""
    return int(getattr(tree, "page_size", 1))


def save_early(request: Any, tree: Any, recent: int) -> None:
    """Have the state of a prompt saved one recent window before its end. SGLang saves one state per
    pass, and takes a place that we name as it takes the place where prompts branch. Where it found
    such a place itself, that one stays."""
    if getattr(pool_beside(tree), "enable_mamba_extra_buffer", False):
        found = request.mamba_branching_seqlen is not None
        request.oscar_early = None if found else (page_size(tree), recent)
        name_place(request)


def name_place(request: Any) -> None:
    """Name the place for the next pass of a prompt that `save_early` saw. Places count from the
    beginning of a pass, and a pass may begin anywhere."""
    planned = getattr(request, "oscar_early", None)  # `save_early` put it there
    if planned is None:
        return
    page_size, recent = planned
    step, absolute = _grid(page_size)
    latest = all_tokens(request) - recent
    steps = (latest - cached_tokens(request)) // step
    place = cached_tokens(request) + steps * step
    off = steps <= 0 or (absolute and place % step != 0)
    request.mamba_branching_seqlen = None if off else place


def _grid(page_size: int) -> tuple[int, bool]:
    """Tokens between places where a state can be saved, counted from the beginning of a pass, and
    whether such a place must also be a multiple of them."""
    from sglang.srt import runtime_context

    if releases.CHECKPOINT_GRID.here(runtime_context):
        return int(runtime_context.mamba_checkpoint_grid(page_size)), False
    return int(runtime_context.get_server_args().mamba_cache_chunk_size), True
