"""Prefill by FlashAttention, against attention in plain torch; what FlashAttention returns is
computed here by its documentation."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_oracle import PlainPrefill
from torch import Tensor

from oscar_zoo.engines.vllm.prefill import FlashPrefill
from oscar_zoo.runtime.engine import Softmax


def flash(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    ends = [given[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    outs, sums = [], []
    for (a, b), (c, d) in zip(*([*itertools.pairwise(x)] for x in ends), strict=True):
        assert b - a <= given["max_seqlen_q"] and d - c <= given["max_seqlen_k"]
        keys, values = (x[c:d].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[a:b], keys) * given["softmax_scale"]
        if given["softcap"]:
            logits = given["softcap"] * torch.tanh(logits / given["softcap"])
        if given["causal"]:
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
            logits = logits.masked_fill(~seen, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), values))
        sums.append(logits.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_parts_merge_to_the_same(cap: float) -> None:
    draw, softmax = torch.Generator().manual_seed(0), Softmax(0.3, cap)
    q, k, v = (torch.randn(12, heads, 8, generator=draw) for heads in (4, 2, 2))
    old = torch.randn(2, 30, 2, 8, generator=draw)
    lengths = (5, 7)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    batch: Any = SimpleNamespace(
        qo_indptr=ends, extend_lens=lengths, spans=[slice(0, 5), slice(5, 12)]
    )
    found = []
    for prefill in (FlashPrefill(flash), PlainPrefill()):
        prefill.begin(batch)
        out, sums = prefill.chunk(q, k, v, batch, softmax)
        both = prefill.merge((out[5:], sums[5:]), prefill.whole(q[5:], *old, softmax))
        found.append((out, both[0], sums * prefill.lse_unit, both[1] * prefill.lse_unit))
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(*found, strict=True))
