"""The memory of states in SGLang, of the layers that do not keep keys and values: who decides
their number, and how."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang.compat import releases

GIB = 1 << 30
"""SGLang counts free memory in these."""
STOCK_RATIO = 0.9
"""SGLang's own `--mamba-full-memory-ratio`."""


def decided() -> bool:
    """Whether the number of state slots is not for us to choose.

    The user named it; or there is no prefix cache, and SGLang takes one per request; or there are
    pipeline stages, whose different layers would make different plans, while all of them need one.
    """
    from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule

    return (
        get_schedule().max_mamba_cache_size is not None
        or bool(get_memory().disable_radix_cache)
        or int(get_parallel().pp_size) > 1
    )


def slots() -> int:
    """State slots of this worker, after SGLang divided its memory."""
    from sglang.srt.runtime_context import get_schedule

    return int(get_schedule().max_mamba_cache_size)


def choose_slots(configurator: Any, number: int) -> None:
    """Name the state slots of this worker before SGLang divides its memory, as
    `--max-mamba-cache-size` does for all data-parallel workers together."""
    from sglang.srt.runtime_context import get_context

    owner = configurator if releases.ATTENTION_DP.here(configurator) else configurator.ps
    total = number * int(owner.attn_dp_size)
    get_context().override("oscar_int2", max_mamba_cache_size=total)


def per_request(configurator: Any) -> int:
    """State slots of a running request: its own, those that it saves for the prefix cache, and
    those that they replace."""
    return int(configurator._calculate_mamba_ratio())


def ratio() -> float:
    """Memory of states to memory of uncompressed tokens (`--mamba-full-memory-ratio`)."""
    from sglang.srt.runtime_context import get_schedule

    return float(get_schedule().mamba_full_memory_ratio)


def most_tokens() -> int | None:
    """`--max-total-tokens`."""
    from sglang.srt.runtime_context import get_schedule

    limit: int | None = get_schedule().max_total_tokens
    return limit
