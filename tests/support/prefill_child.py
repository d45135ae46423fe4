"""SGLang's Triton kernel for prefill against plain attention, interpreted in float32."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from plain_prefill import PlainPrefill

HEADS, GROUP, CACHED = 2, 4, 70
LENGTHS = (37, 1, 0, 5)
"""New tokens of the requests of a pass."""


def differences(widths: list[tuple[int, int]], out: str) -> None:
    """Largest differences of a pass over new tokens, of one over cached tokens, and of both merged,
    by the channels of K and V; JSON in the file `out`."""
    Path(out).write_text(json.dumps([_of(k, v) for k, v in widths]))


def _of(k_dim: int, v_dim: int) -> list[float]:
    from oscar_zoo.engines.sglang.compat.backends import TritonPrefill
    from oscar_zoo.runtime.engine import Softmax

    draw = torch.Generator().manual_seed(3)
    softmax = Softmax(k_dim**-0.5, cap=3.0)

    def rows(count: int, heads: int, dim: int) -> torch.Tensor:
        fused = torch.randn(count, heads, 2 * dim, generator=draw)
        return fused[..., :dim]  # rows of a joint projection are not adjacent

    q = rows(sum(LENGTHS), HEADS * GROUP, k_dim)
    new, cached = (
        (rows(count, HEADS, k_dim), rows(count, HEADS, v_dim)) for count in (len(q), CACHED)
    )
    ends = list(accumulate(LENGTHS))
    batch: Any = SimpleNamespace(
        qo_indptr=torch.tensor([0, *ends], dtype=torch.int32),
        extend_lens=LENGTHS,
        spans=[slice(e - n, e) for e, n in zip(ends, LENGTHS, strict=True)],
    )
    results = []
    for prefill in (PlainPrefill(), TritonPrefill()):
        prefill.begin(batch)
        chunk = prefill.chunk(q, *new, batch, softmax)
        whole = prefill.whole(q, *cached, softmax)
        parts = (chunk, whole, prefill.merge(chunk, whole))
        results.append([(out, lse * prefill.lse_unit) for out, lse in parts])
    return [
        float((mine - theirs).abs().max())
        for one, other in zip(*results, strict=True)
        for mine, theirs in zip(one, other, strict=True)
    ]
