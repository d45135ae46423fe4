"""`Prefill` by SGLang's own Triton kernel, for heads that FlashInfer does not have.

SGLang runs Gemma 4 with the same kernel. Log-sum-exps are natural.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.softmax import Softmax


class TritonPrefill:
    """`oscar_zoo.runtime.prefill.Prefill` over `extend_attention_fwd`, which plans nothing."""

    lse_unit = 1.0

    def __init__(self) -> None:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        self._run: Any = extend_attention_fwd

    def begin(self, batch: Batch) -> None:
        """See `Prefill`."""

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        no_prefix = torch.zeros_like(batch.qo_indptr)
        return self._attend(
            q,
            (k, v),
            (k, v),
            (batch.qo_indptr, no_prefix, no_prefix),
            max(batch.extend_lens),
            softmax,
            skip_prefix=True,
        )

    def whole(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        ends = torch.arange(2, dtype=torch.int32, device=q.device)
        cuts = ends * len(q), ends * len(k), torch.arange(len(k), device=q.device)
        return self._attend(q, (k, v), (k, v), cuts, len(q), softmax, skip_extend=True)

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        lse = torch.logaddexp(one[1], other[1])
        first, second = ((part[1] - lse).exp()[..., None] for part in (one, other))
        return (first * one[0] + second * other[0]).to(one[0].dtype), lse

    def _attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        cuts: tuple[Tensor, Tensor, Tensor],
        longest: int,
        softmax: Softmax,
        **part: bool,
    ) -> tuple[Tensor, Tensor]:
        """One call, of the part over `new` tokens or of that over `cached` ones.

        Args:
            cuts: `qo_indptr`, `kv_indptr` and `kv_indices`.
        """
        out = q.new_empty(*q.shape[:2], cached[1].shape[-1])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        self._run(
            q,
            *new,
            out,
            *cached,
            *cuts,
            None,
            True,
            None,
            longest,
            1.0,
            1.0,
            sm_scale=softmax.scale,
            logit_cap=softmax.cap,
            lse_extend=lse,
            **part,
        )
        return out, lse
