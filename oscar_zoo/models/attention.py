"""The softmax of an attention layer, and how to replace what full-attention layers compute.

With x the products of queries and keys, logits are `cap * tanh(scaling * x / cap)`, or
`scaling * x` without a cap. A learned sink is the logit of a row without a value: it takes part of
the weight of every query of its head. Both make a difference when one number is added to all
products of a query, which a plain softmax ignores. Every model is loaded with `EXACT`: the `sdpa`
of transformers, except for calls with a cap or sinks, which it would leave out without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

# first: it prepares the imports of transformers, or reports what is missing
from oscar_zoo.models import model_source  # noqa: F401

# isort: split

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.latent import Latents, latents_of

if TYPE_CHECKING:
    from oscar_zoo.models.loading import LoadedModel

LOGITS_AT_ONCE = 1 << 25
"""Logits computed at once where no kernel of torch does it: 128 MB in float32."""

EXACT = "oscar_zoo_exact"
"""Its name in transformers."""

AttentionFn = Callable[[int, Tensor, Tensor, Tensor, "Softmax"], Tensor]
"""`(layer_id, query [B, n_q, T, d], key [B, n_kv, T, d], value [B, n_kv, T, dv], softmax) -> output
[B, n_q, T, dv]`; of latents see `latent`"""

SCOPE = "oscar_zoo_scope"
BLOCKED = {"position_bias": "a position bias"}
"""Arguments of an attention call that change the softmax in ways that `Softmax` does not know, and
their names in messages. `attention_scope` refuses them."""


@dataclass(frozen=True)
class Softmax:
    """See the module. `scaling` is the factor of the products, `cap` the largest absolute logit,
    and `sinks` `[num_q_heads]` the logit of each head's sink, at least float32."""

    scaling: float
    cap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def of_call(cls, query: Tensor, given: Mapping[str, Any]) -> Softmax:
        """What a call of transformers' attention interface asks for; `query` is `[B, n_q, T,
        d]`."""
        scaling, sinks = given.get("scaling"), given.get("s_aux")
        if sinks is not None:
            wide = torch.promote_types(sinks.dtype, torch.float32)
            sinks = sinks.detach().to(wide, copy=True)  # streamed weights do not stay
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        return cls(scaling, given.get("softcap"), sinks)

    @property
    def plain(self) -> bool:
        return self.cap is None and self.sinks is None

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def total(self, logits: Tensor) -> Tensor:
        """The logarithm of the denominator, `[.., num_q_heads, T, 1]`, of capped `logits`, `[..,
        num_q_heads, T, R]`, with `-inf` where a query does not read."""
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
    """Attention of one layer, `[B, num_q_heads, T, dv]` in the dtype of `query`; logits and weights
    are at least float32. `query` is `[B, num_q_heads, T, d]`, `key` and `value` are `[B,
    num_kv_heads, R, d]` and `[.., dv]`, heads not repeated. `mask` is true where a query reads a
    row, or added to the logits, and broadcasts to `[B, 1, T, R]`; `None` is causal, for the queries
    of the last rows. `shift`, `[B, num_q_heads, T, 1]`, is added to the scaled products of a query
    before the cap; a plain softmax ignores it."""
    if mask is None and not (softmax.plain and query.shape[2] in (1, key.shape[2])):
        mask = _causal(query, key)
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
    assert mask is not None
    size = max(1, LOGITS_AT_ONCE // (batch * heads * key.shape[2]))
    found = []
    for first in range(0, tokens, size):
        rows = slice(first, first + size)
        moved = None if shift is None else shift[:, :, rows]
        found.append(_some(query[:, :, rows], key, value, mask[..., rows, :], softmax, moved))
    return torch.cat(found, 2).to(query.dtype)


def _causal(query: Tensor, key: Tensor) -> Tensor:
    """The mask of the last positions, `[T, R]`."""
    new, rows = query.shape[2], key.shape[2]
    return torch.ones(new, rows, dtype=torch.bool, device=key.device).tril(rows - new)


def _some(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softmax: Softmax, shift: Tensor | None
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


def exact_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """One call of transformers' attention interface; returns `[B, T, n_q, dv]` and no weights."""
    softmax = Softmax.of_call(query, rest)
    if attention_mask is None and 1 < query.shape[2] < key.shape[2]:
        attention_mask = _causal(query, key)
    if softmax.plain:
        result: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, **rest
        )
        return result
    return attend(query, key, value, attention_mask, softmax).transpose(1, 2).contiguous(), None


AttentionInterface.register(EXACT, exact_attention)
AttentionMaskInterface.register(EXACT, sdpa_mask)


@contextmanager
def attention_scope(model: LoadedModel, fn: AttentionFn) -> Iterator[None]:
    """Send every full-attention call of `model` to `fn` while the scope is open. Queries and keys
    arrive after qk-norm and RoPE, keys and values before head repetition, and no mask arrives: `fn`
    decides which keys each query reads. Batches must not be padded. Of models with latents it gets
    these (`latent`)."""
    wanted, seen = set(model.block.attention_layers), set[int]()
    latents: Latents | None = None

    def routed(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        layer_id = getattr(module, "layer_idx", None)
        if layer_id not in wanted:
            return exact_attention(module, query, key, value, attention_mask, **rest)
        for name, what in BLOCKED.items():
            if rest.get(name) is not None:
                raise UnsupportedModel(
                    f"layer {layer_id} of {model.block.id} uses {what}, which is not simulated."
                )
        seen.add(layer_id)
        softmax = Softmax.of_call(query, rest)
        if latents is None:
            output = fn(layer_id, query, key, value, softmax)
        else:
            sums = fn(layer_id, *latents.rows(module, query, key), softmax)
            output = latents.output(module, sums)
        return output.transpose(1, 2).contiguous(), None

    before = model.model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[SCOPE] = routed
    # masks are made for registered names only: without them, sliding-window layers would see
    # everything
    ALL_MASK_ATTENTION_FUNCTIONS.register(SCOPE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.model.set_attn_implementation(SCOPE)
        with latents_of(model.model, model.block) as latents:
            yield
    finally:
        model.model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[SCOPE]
    if missing := sorted(wanted - seen):
        message = f"attention of layers {missing} of {model.block.id} was never reached."
        hint = "its attention code does not use transformers' attention interface"
        raise UnsupportedModel(message, hint=hint)
