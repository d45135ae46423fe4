"""`kernel_executor.Prefill` in plain PyTorch, for tests of the kernels on machines without
FlashInfer."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_zoo.runtime.batch import ExtendBatch


class PlainPrefill:
    """Scores of all pairs in float32: exact, slow, and large."""

    def begin(self, batch: ExtendBatch) -> None:
        """See `Prefill`."""
        self._begun = batch

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: ExtendBatch, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`.

        Raises:
            RuntimeError: another batch was begun.
        """
        if self._begun is not batch:
            raise RuntimeError("a pass over tokens that was not planned")
        parts = [_attention(q[a:b], k[a:b], v[a:b], scaling, causal=True) for a, b in batch.spans]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def whole(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        return _attention(q, k, v, scaling, causal=False)

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        lse = torch.logaddexp(one[1], other[1])
        weights = (one[1] - lse).exp()[..., None], (other[1] - lse).exp()[..., None]
        return (weights[0] * one[0] + weights[1] * other[0]).to(one[0].dtype), lse


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    scores = (
        torch.einsum("qhgd,khd->qhgk", q.float().unflatten(1, (k.shape[1], -1)), k.float())
        * scaling
    )
    if causal:
        scores = scores.masked_fill(
            torch.ones(len(q), len(k)).triu(1).bool()[:, None, None], float("-inf")
        )
    out = torch.einsum("qhgk,khd->qhgd", scores.softmax(-1), v.float())
    return out.flatten(1, 2).to(q.dtype), scores.logsumexp(-1).flatten(1)
