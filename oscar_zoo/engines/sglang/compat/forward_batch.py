"""SGLang's `ForwardBatch`: from the engine's batch to a `StepInput`."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang.compat import radix_attention, speculation
from oscar_zoo.runtime.engine import StepInput


def step_input(forward_batch: Any) -> StepInput:
    """What one forward pass brings, for the INT2 cache.

    Prefill, chunked prefill and mixed batches are extend steps; a decode row of a mixed batch is an
    extend by one token. A batch with drafts is an extend batch for SGLang as well, so it is looked
    for first. An extend step waits for its request rows, other steps on a GPU wait for nothing.
    """
    rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
    out_loc = radix_attention.write_location(forward_batch.out_cache_loc)
    on_host = () if rows.is_cuda else tuple(rows.tolist())
    if speculation.verifies(forward_batch):
        drafts = speculation.drafts_of(forward_batch, out_loc)
        return StepInput("verify", rows, on_host, seq_lens, out_loc, drafts=drafts)
    if not forward_batch.forward_mode.is_extend():
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
