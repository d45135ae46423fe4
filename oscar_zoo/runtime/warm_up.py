"""Every kernel of prefill once before the server says that it is ready, so that no request waits
for a compiler.

Decode needs none of it: SGLang captures its graphs before it is ready, which compiles what they
hold. All steps belong to the padding row and to slot 0, which are nobody's, and to the first layer:
the others have the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels.decode_attention import tuning
from oscar_zoo.runtime import executor
from oscar_zoo.runtime.batch import ExtendBatch, extend_batch
from oscar_zoo.runtime.executor import Executor

PREFIX = 2
"""Cached tokens of a request that has any."""


@dataclass(frozen=True)
class Extend:
    """One step: every request has `prefix` cached tokens and brings `new` ones."""

    requests: int
    prefix: int
    new: int


def steps() -> list[Extend]:
    """No prefix; fused extends of every tile, by as few requests as may be fused; an extend over
    pieces of a prefix."""
    most = executor.SHORT
    each = min(most, tuning.FUSED_TOKENS)
    shared = [(1 << n, -(-(1 << n) // each)) for n in range(most.bit_length())]
    fused = [Extend(requests, PREFIX, total // requests) for total, requests in shared]
    return [Extend(1, 0, 2), *fused, Extend(1, PREFIX, most + 1)]


def warm_up(executor: Executor, table: Tensor, *, scaling: float, scratch_tokens: int) -> None:
    """Run all steps and wait for them.

    Args:
        executor: of the worker.
        table: `[R, most tokens]` the engine's slots by row and position.
        scaling: factor of the logits.
        scratch_tokens: of a piece of prefix.
    """
    device, longest = table.device, table.shape[1]
    for step in steps():
        if step.prefix + step.new > longest:
            continue
        rows = torch.zeros(step.requests, dtype=torch.int64, device=device)
        written = torch.zeros(step.requests * step.new, dtype=torch.int64, device=device)
        prefixes, lengths = [step.prefix] * step.requests, [step.new] * step.requests
        batch = extend_batch(
            table, rows, written, prefixes, lengths, executor.windows, piece=scratch_tokens
        )
        executor.prefill.begin(batch)
        _run(executor, batch, len(written), scaling)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run(executor: Executor, batch: ExtendBatch, new: int, scaling: float) -> None:
    cache = executor.caches[0]
    heads, dtype, device = executor.num_q_heads, cache.ring_k.dtype, cache.ring_k.device
    widths = ((heads, cache.k_spec.head_dim), (cache.num_kv_heads, cache.k_spec.head_dim))
    q, k = (torch.zeros(new, *width, dtype=dtype, device=device) for width in widths)
    v = torch.zeros(new, cache.num_kv_heads, cache.v_spec.head_dim, dtype=dtype, device=device)
    executor.extend(0, q, k, v, batch, scaling=scaling)
