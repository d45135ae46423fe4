"""Run every kernel of prefill once before the server is ready, so that no request waits for a
compiler.

Decode needs no warm-up: SGLang captures its graphs before it is ready, which compiles what they
hold. All steps belong to the padding row and to slot 0, which no request owns, and to one layer for
each pair of widths: the other layers have the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_kernels.decode_attention import tuning
from oscar_zoo.runtime import executor
from oscar_zoo.runtime.batch import Batch, extend_batch
from oscar_zoo.runtime.engine import CacheConfig, SlotSource
from oscar_zoo.runtime.executor import Executor
from oscar_zoo.runtime.softmax import Softmax

PREFIX = 2
"""Cached tokens of a request that has a prefix."""


@dataclass(frozen=True)
class Extend:
    """One step, in which every request has `prefix` cached tokens and brings `new` ones."""

    requests: int
    prefix: int
    new: int


def steps() -> list[Extend]:
    """The steps: one without a prefix, fused extends of every tile with as few requests as can be
    fused, and one over pieces of a prefix."""
    most = executor.SHORT
    each = min(most, tuning.FUSED_TOKENS)
    shared = [(1 << n, -(-(1 << n) // each)) for n in range(most.bit_length())]
    fused = [Extend(requests, PREFIX, total // requests) for total, requests in shared]
    return [Extend(1, 0, 2), *fused, Extend(1, PREFIX, most + 1)]


def warm_up(executor: Executor, source: SlotSource, config: CacheConfig) -> None:
    """Run all steps and wait for them."""
    device = executor.caches[0].codes.device
    for step in steps():
        if step.prefix + step.new > config.max_tokens:
            continue
        rows = torch.zeros(step.requests, dtype=torch.int64, device=device)
        out_loc = torch.zeros(step.requests * step.new, dtype=torch.int64, device=device)
        prefix_lens, extend_lens = [step.prefix] * step.requests, [step.new] * step.requests
        batch = extend_batch(
            source,
            rows,
            out_loc,
            prefix_lens,
            extend_lens,
            executor.windows,
            piece_tokens=config.piece_tokens,
        )
        executor.begin(batch)
        for layer in _first_layers(executor):
            _run(executor, layer, batch, config.softmax)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_layers(executor: Executor) -> list[int]:
    """The first layer of every kind of rows: bits and clip make kernels of their own."""
    first: dict[object, int] = {}
    for index, cache in enumerate(executor.caches):
        first.setdefault((cache.k_spec, cache.v_spec), index)
    return list(first.values())


def _run(executor: Executor, layer: int, batch: Batch, softmax: Softmax) -> None:
    cache, new = executor.caches[layer], batch.num_tokens
    heads, dtype, device = executor.num_q_heads, cache.ring_k.dtype, cache.ring_k.device
    widths = ((heads, cache.k_spec.head_dim), (cache.num_kv_heads, cache.k_spec.head_dim))
    q, k = (torch.zeros(new, *width, dtype=dtype, device=device) for width in widths)
    v = torch.zeros(new, cache.num_kv_heads, cache.v_spec.head_dim, dtype=dtype, device=device)
    executor.forward(layer, q, k, v, batch, softmax)
