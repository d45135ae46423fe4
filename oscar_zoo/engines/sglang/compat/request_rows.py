"""Requests, the rows of SGLang's slot table that they own, and the prefix cache beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.runtime.sink_blocks import PromptKey


def newly_allocated(original: Callable[..., Any], pool: Any, request: Any) -> tuple[Any, list[int]]:
    """Call SGLang's row allocator; return its result, and the rows that got a new owner.

    Where SGLang has no `releases.ALLOCATE_ROWS`, only the generation counter tells which rows these
    are. It is compared over this one call, because `clear` sets it to zero.
    """
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
    the other end, so that the row that has been free for longest is taken first.
    """
    free = pool.free_slots
    before = len(free)
    result, rows = original(pool, request), list(free[before:])
    if rows and releases.ALLOCATE_ROWS.here(pool):
        del free[before:]
        free[:0] = rows
    return result, rows


def rows_in_use(req_to_token_pool: Any) -> int:
    """Request rows with an owner."""
    return int(req_to_token_pool.size) - int(req_to_token_pool.available_size())


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
    """All tokens of a request, prompt and answer."""
    asked, said = asked_and_said(request)
    return [*asked, *said] if said else asked


def new_requests(requests: Any) -> Iterator[tuple[int, int]]:
    """Tokens in all and cached tokens of every request that is about to get a row.

    Requests that keep their row are skipped.
    """
    for request in requests:
        kv: Any = getattr(request, "kv", None)
        keeps = kv.holds_kv if releases.HOLDS_KV.here(kv) else request.req_pool_idx is not None
        if not keeps:
            yield all_tokens(request), cached_tokens(request)


def all_tokens(request: Any) -> int:
    """Tokens of a request, prompt and answer."""
    return len(request.origin_input_ids) + len(request.output_ids)


def cached_tokens(request: Any) -> int:
    """Tokens of a request that the prefix cache has, or that were prefilled already."""
    if releases.PREFIX.here(request):
        return int(request.prefix_len)
    return len(request.prefix_indices)


def pool_beside(tree: Any) -> Any:
    """The pool of request rows beside a prefix cache; `None` if it has none."""
    return getattr(tree, "req_to_token_pool", None)


def page_size(tree: Any) -> int:
    """Tokens of a page; hits of a prefix cache end at multiples of it."""
    return int(getattr(tree, "page_size", 1))
