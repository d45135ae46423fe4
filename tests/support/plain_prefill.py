"""`runtime.prefill.Prefill` in plain PyTorch, for machines without FlashInfer."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernels.decode_attention.reference import attend
from oscar_zoo.runtime.batch import Batch


class PlainPrefill:
    """Dense attention in float32, with natural log-sum-exps."""

    def begin(self, batch: Batch) -> None:
        """See `Prefill`."""
        self._begun = batch

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sm_scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`.

        Raises:
            RuntimeError: another batch was begun.
        """
        if self._begun is not batch:
            raise RuntimeError("a pass over tokens that was not planned")
        parts = [
            attend(q[own].float(), k[own].float(), v[own].float(), sm_scale, 0.0)
            for own in batch.spans
        ]
        return torch.cat([out for out, _ in parts]).to(q.dtype), torch.cat([x for _, x in parts])

    def whole(self, q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        grouped = q.float().unflatten(1, (k.shape[1], -1))
        logits = torch.einsum("qhgd,khd->qhgk", grouped, k.float()) * sm_scale
        out = torch.einsum("qhgk,khd->qhgd", logits.softmax(-1), v.float())
        return out.flatten(1, 2).to(q.dtype), logits.logsumexp(-1).flatten(1)

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        lse = torch.logaddexp(one[1], other[1])
        weights = (one[1] - lse).exp()[..., None], (other[1] - lse).exp()[..., None]
        return (weights[0] * one[0] + weights[1] * other[0]).to(one[0].dtype), lse
