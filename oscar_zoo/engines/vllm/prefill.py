"""Dense attention over 16-bit rows by the FlashAttention that vLLM brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.engine import Softmax

LARGEST_HEAD = 256


class FlashPrefill:
    """`oscar_zoo.runtime.prefill.Prefill`."""

    lse_unit = 1.0

    def __init__(self, attention: Callable[..., Any]) -> None:
        """`attention` is `flash_attn_varlen_func`, whose sums are `[num_q_heads, tokens]`."""
        self._attention = attention
        self._new: tuple[Tensor, int] | None = None

    def begin(self, batch: Batch) -> None:
        assert batch.qo_indptr is not None
        self._new = batch.qo_indptr, max(batch.extend_lens)

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        assert self._new is not None
        return self._run(q, k, v, self._new, self._new, softmax, causal=True)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        ends = [torch.tensor([0, len(x)], dtype=torch.int32).to(q.device) for x in (q, k)]
        of_q, of_k = (ends[0], len(q)), (ends[1], len(k))
        return self._run(q, k, v, of_q, of_k, softmax, causal=False)

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        sums = torch.logaddexp(one[1], other[1])
        first, second = ((lse - sums).exp()[..., None] * out for out, lse in (one, other))
        return (first + second).to(one[0].dtype), sums

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, of_q: Any, of_k: Any, softmax: Softmax, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """`of_q` and `of_k`: where requests end, `[B + 1]` int32, and the longest one."""
        out, sums = self._attention(
            q,
            k,
            v,
            cu_seqlens_q=of_q[0],
            max_seqlen_q=of_q[1],
            cu_seqlens_k=of_k[0],
            max_seqlen_k=of_k[1],
            softmax_scale=softmax.scale,
            softcap=softmax.cap,
            causal=causal,
            return_softmax_lse=True,
        )
        return out, sums.mT.contiguous()
