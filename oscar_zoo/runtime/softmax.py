"""The softmax of a layer: what an engine's attention layer may ask for beside plain attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Softmax:
    """How logits become weights.

    Attributes:
        scale: factor of the products of queries and keys.
        cap: `c` for `c * tanh(logit / c)`; 0 for none. It does not go with centred keys, because
            they shift the logits.
        sinks: `[num_q_heads]`, a learned logit of every query head that takes its share of every
            softmax and has no value (gpt-oss); `None` for none.
    """

    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None

    def sink_logits(self, query: Tensor, k_mean: Tensor | None) -> Tensor | None:
        """The learned logit beside those that the cache gives, or `None` without one.

        Args:
            query: `[T, num_q_heads, head_dim]`, not transformed.
            k_mean: `[1 or num_kv_heads, 1, head_dim]`, subtracted from the keys whose logits stand
                beside this one; `None` where they are whole.

        Returns:
            `[T, num_q_heads]` float32, perhaps with a stride of 0.
        """
        if self.sinks is None:
            return None
        sinks = self.sinks.float()
        if k_mean is None:
            return sinks.expand(query.shape[0], -1)
        grouped = query.float().unflatten(1, (k_mean.shape[0], -1))
        moved = torch.einsum("thgd,hd->thg", grouped, k_mean.float().reshape(k_mean.shape[0], -1))
        return sinks - self.scale * moved.flatten(1)
