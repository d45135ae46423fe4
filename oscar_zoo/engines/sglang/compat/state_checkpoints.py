"""Where SGLang saves a state of a hybrid model for its prefix cache while it prefills a prompt.

A prefix hit ends at a saved state. SGLang saves the last one it can, near the end of the prompt. A
hit that leaves the recent window to prefill must end earlier, so it would fall back to a much older
state, or to none.
"""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang.compat import releases, request_rows


def save_early(request: Any, tree: Any, recent: int) -> None:
    """Have the state of a prompt saved one recent window before its end.

    SGLang saves one state per pass, and takes a place that we name as it takes the place where
    prompts branch. Where it found such a place itself, that one stays.

    Args:
        tree: the prefix cache; it does nothing without a buffer for the states that it takes.
        recent: tokens that a hit leaves to prefill.
    """
    if getattr(request_rows.pool_beside(tree), "enable_mamba_extra_buffer", False):
        found = request.mamba_branching_seqlen is not None
        request.oscar_early = None if found else (request_rows.page_size(tree), recent)
        name_place(request)


def name_place(request: Any) -> None:
    """Name the place for the next pass of a prompt that `save_early` saw.

    Places count from the beginning of a pass, and a pass may begin anywhere.
    """
    planned = getattr(request, "oscar_early", None)  # `save_early` put it there
    if planned is None:
        return
    page_size, recent = planned
    step, absolute = _grid(page_size)
    latest = request_rows.all_tokens(request) - recent
    place = early_place(request_rows.cached_tokens(request), latest, step)
    off = place is None or (absolute and place % step != 0)
    request.mamba_branching_seqlen = None if off else place


def early_place(prefix: int, latest: int, step: int) -> int | None:
    """The last place that is a whole number of steps behind `prefix` and not behind `latest`;
    `None` if there is none."""
    steps = (latest - prefix) // step
    return prefix + steps * step if steps > 0 else None


def _grid(page_size: int) -> tuple[int, bool]:
    """Tokens between places where a state can be saved, counted from the beginning of a pass, and
    whether such a place must also be a multiple of them."""
    from sglang.srt import runtime_context

    if releases.CHECKPOINT_GRID.here(runtime_context):
        return int(runtime_context.mamba_checkpoint_grid(page_size)), False
    return int(runtime_context.get_server_args().mamba_cache_chunk_size), True
