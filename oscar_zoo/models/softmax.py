"""The softmax of one attention layer: its scaling, a soft cap and learned sinks.

With x the products of queries and keys, logits are `cap * tanh(scaling * x / cap)`, or
`scaling * x` without a cap. A learned sink is the logit of a row without a value: it takes part of
the weight of every query of its head. Both make a difference when one number is added to all
products of a query, which a plain softmax ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LOGITS_AT_ONCE = 1 << 25
"""Logits computed at once where no kernel of torch does it: 128 MB in float32."""


@dataclass(frozen=True)
class Softmax:
    """See the module.

    Attributes:
        scaling: factor of the products.
        cap: largest absolute logit; `None` for none.
        sinks: `[num_q_heads]`, at least float32, the logit of each head's sink; `None` for none.
    """

    scaling: float
    cap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def of_call(cls, query: Tensor, given: Mapping[str, Any]) -> Softmax:
        """The softmax that a call of transformers' attention interface asks for.

        Args:
            query: `[B, num_q_heads, T, d]`.
        """
        scaling, sinks = given.get("scaling"), given.get("s_aux")
        if sinks is not None:
            wide = torch.promote_types(sinks.dtype, torch.float32)
            sinks = sinks.detach().to(wide, copy=True)  # streamed weights do not stay
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        return cls(scaling, given.get("softcap"), sinks)

    @property
    def plain(self) -> bool:
        """Whether there is neither a cap nor a sink."""
        return self.cap is None and self.sinks is None

    def capped(self, logits: Tensor) -> Tensor:
        """Scaled products after the cap."""
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def total(self, logits: Tensor) -> Tensor:
        """The logarithm of the denominator.

        Args:
            logits: `[.., num_q_heads, T, R]`, capped, with `-inf` where a query does not read.

        Returns:
            `[.., num_q_heads, T, 1]`.
        """
        total = logits.logsumexp(-1, keepdim=True)
        if self.sinks is None:
            return total
        return torch.logaddexp(total, self.sinks.to(total)[:, None, None])

    def weights(self, logits: Tensor) -> Tensor:
        """The weights of the rows; argument as of `total`. A sink takes the rest."""
        if self.sinks is None:
            return logits.softmax(-1)
        return (logits - self.total(logits)).exp()

    def to(self, device: torch.device) -> Softmax:
        """A copy on another device."""
        return self if self.sinks is None else replace(self, sinks=self.sinks.to(device))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softmax: Softmax,
    *,
    shift: Tensor | None = None,
) -> Tensor:
    """Attention of one layer; logits and weights are at least float32.

    Args:
        query: `[B, num_q_heads, T, d]`.
        key, value: `[B, num_kv_heads, R, d]` and `[.., dv]`, heads not repeated.
        mask: bool, true where a query reads a row, or added to the logits; it broadcasts to
            `[B, 1, T, R]`. `None` is causal, for queries and rows of the same positions.
        shift: `[B, num_q_heads, T, 1]`, added to the scaled products of a query before the cap.
            A plain softmax ignores it.

    Returns:
        `[B, num_q_heads, T, dv]` in the dtype of `query`.
    """
    if softmax.plain:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and query.shape[2] > 1,
            scale=softmax.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    batch, heads, tokens, _ = query.shape
    if mask is None:
        mask = torch.ones(tokens, key.shape[2], dtype=torch.bool, device=query.device).tril()
    size = max(1, LOGITS_AT_ONCE // (batch * heads * key.shape[2]))
    found = []
    for first in range(0, tokens, size):
        rows = slice(first, first + size)
        moved = None if shift is None else shift[:, :, rows]
        found.append(_some(query[:, :, rows], key, value, mask[..., rows, :], softmax, moved))
    return torch.cat(found, 2).to(query.dtype)


def _some(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    softmax: Softmax,
    shift: Tensor | None,
) -> Tensor:
    """`attend` for some queries; the result keeps the dtype of the logits."""
    wide = torch.promote_types(query.dtype, torch.float32)
    by_head = query.to(wide).unflatten(1, (key.shape[1], -1)) * softmax.scaling
    logits = (by_head @ key.to(wide).mT[:, :, None]).flatten(1, 2)
    logits = softmax.capped(logits if shift is None else logits + shift)
    if mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    else:
        logits = logits + mask
    weights = softmax.weights(logits)
    return (weights.unflatten(1, (key.shape[1], -1)) @ value.to(wide)[:, :, None]).flatten(1, 2)
