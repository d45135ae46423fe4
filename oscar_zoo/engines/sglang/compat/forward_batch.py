"""SGLang's `ForwardBatch`: from the engine's batch to a `StepInput`."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang.compat import radix_attention
from oscar_zoo.runtime.engine import StepInput


def step_input(forward_batch: Any) -> StepInput:
    """What one forward pass brings, for the INT2 cache.

    Prefill, chunked prefill and mixed batches are extend steps; a decode row of a mixed batch is an
    extend by one token. An extend step waits for its request rows, a decode step on a GPU waits
    for nothing.
    """
    rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
    out_loc = radix_attention.write_location(forward_batch.out_cache_loc)
    if not forward_batch.forward_mode.is_extend():
        on_host = () if rows.is_cuda else tuple(rows.tolist())
        return StepInput("decode", rows, on_host, seq_lens, out_loc[: len(rows)])
    prefix_lens = tuple(int(n) for n in forward_batch.extend_prefix_lens_cpu)
    extend_lens = tuple(int(n) for n in forward_batch.extend_seq_lens_cpu)
    return StepInput(
        "extend",
        rows,
        tuple(rows.tolist()),
        seq_lens,
        out_loc[: sum(extend_lens)],
        prefix_lens,
        extend_lens,
    )
