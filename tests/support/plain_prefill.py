"""`runtime.prefill.Prefill` in plain PyTorch, for machines without FlashInfer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oscar_kernels.reference import attend
from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.engine import Softmax


class PlainPrefill:
    """Dense attention in float32, with log-sum-exps to base 2 as FlashInfer's are."""

    lse_unit = math.log(2)

    def begin(self, batch: Batch) -> None:
        """See `Prefill`."""
        self._begun = batch

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`.

        Raises:
            RuntimeError: another batch was begun.
        """
        if self._begun is not batch:
            raise RuntimeError("a pass over tokens that was not planned")
        parts = [
            attend(q[own].float(), k[own].float(), v[own].float(), softmax.scale, softmax.cap)
            for own in batch.spans
        ]
        sums = torch.cat([x for _, x in parts]) / self.lse_unit
        return torch.cat([out for out, _ in parts]).to(q.dtype), sums

    def whole(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        grouped = q.float().unflatten(1, (k.shape[1], -1))
        logits = torch.einsum("qhgd,khd->qhgk", grouped, k.float()) * softmax.scale
        if softmax.cap:
            logits = softmax.cap * torch.tanh(logits / softmax.cap)
        out = torch.einsum("qhgk,khd->qhgd", logits.softmax(-1), v.float())
        return out.flatten(1, 2).to(q.dtype), logits.logsumexp(-1).flatten(1) / self.lse_unit

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        lse = torch.logaddexp2(one[1], other[1])
        weights = (one[1] - lse).exp2()[..., None], (other[1] - lse).exp2()[..., None]
        return (weights[0] * one[0] + weights[1] * other[0]).to(one[0].dtype), lse
