"""Every kernel of prefill once before the server says that it is ready, so that no request waits for a compiler.

Decode needs none of it: SGLang captures its graphs before it is ready, which compiles what they hold. All steps belong
to the padding row and to slot 0, which are nobody's, and to the first layer: the others have the same shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_zoo.sglang_plugin import kernel_executor
from oscar_zoo.sglang_plugin.device_batch import ExtendBatch, extend_batch
from oscar_zoo.sglang_plugin.kernel_executor import KernelExecutor

PREFIX = 2
"""Cached tokens of a step that has any."""


def steps() -> list[tuple[int, int]]:
    """Cached and new tokens of every step: no prefix, short extends of every tile, an extend over pieces."""
    short = kernel_executor.SHORT
    powers = [1 << n for n in range(short.bit_length())]
    return [(0, 2), *((PREFIX, new) for new in powers), (PREFIX, short + 1)]


def warm_up(executor: KernelExecutor, table: Tensor, *, scaling: float, scratch_tokens: int) -> None:
    """Run all steps and wait for them.

    Args:
        executor: of the worker.
        table: `[R, most tokens]` the engine's slots by row and position.
        scaling: factor of the logits.
        scratch_tokens: of a piece of prefix.
    """
    device, most = table.device, table.shape[1]
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for prefix, new in steps():
        if prefix + new > most:
            continue
        written = torch.zeros(new, dtype=torch.int64, device=device)
        batch = extend_batch(table, rows, written, [prefix], [new], executor.windows, piece=scratch_tokens)
        executor.prefill.begin(batch)
        _run(executor, batch, new, scaling)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run(executor: KernelExecutor, batch: ExtendBatch, new: int, scaling: float) -> None:
    cache = executor.caches[0]
    heads, dtype, device = executor.num_q_heads, cache.ring_k.dtype, cache.ring_k.device
    widths = ((heads, cache.k_spec.head_dim), (cache.num_kv_heads, cache.k_spec.head_dim))
    q, k = (torch.zeros(new, *width, dtype=dtype, device=device) for width in widths)
    v = torch.zeros(new, cache.num_kv_heads, cache.v_spec.head_dim, dtype=dtype, device=device)
    executor.extend(0, q, k, v, batch, scaling=scaling)
