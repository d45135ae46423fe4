"""Multi-head latent attention (MLA) as attention with one KV head.

A token's row is a latent c, after its norm, and a rotary key k. `kv_b_proj` makes keys and values
of heads from c. With these weights absorbed, W_UK into queries and W_UV behind the attention, all
query heads read the same row:

    logit  = scaling * ((q_nope W_UK) c^T + q_rope k^T)
    output = (sum over tokens of p c) W_UV W_O

So whoever computes the attention of such a model gets queries and keys of `head_dim` channels of a
latent and `rotary_key` more, and latents as values, of one KV head, and gives sums of latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.checkpoint import whole_weight

NAMES = ("layer_idx", "kv_a_layernorm", "kv_b_proj", "qk_head_dim")
"""What attention with latents has in transformers."""
UNLIKE = 0.05
"""Largest relative difference of keys from those that latents give; bfloat16 makes 0.003."""


class Latents:
    """The latents of the layers of one model while it runs, and its attention with them."""

    def __init__(self, block: ModelBlock) -> None:
        self.block = block
        self._latents: dict[int, Tensor] = {}
        self._known: set[int] = set()

    def keep(self, module: Any, args: Any, latent: Tensor, *, layer: int) -> None:
        """A hook of the norm behind which the latents of a layer are."""
        self._latents[layer] = latent.detach()

    def rows(self, module: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, heads, T, d + rope]`, keys `[B, 1, T, d + rope]` and values `[B, 1, T, d]`,
        from the queries and keys of heads `[B, heads, T, nope + rope]` of a call."""
        layer, width = module.layer_idx, self.block.head_dim
        latent = self._latents.pop(layer, None)
        if latent is None or latent.shape[-1] != width:
            raise self._unlike(layer)
        up, plain = (
            up_weights(module, self.block)[0].to(query),
            key.shape[-1] - (self.block.rotary_key or 0),
        )
        if layer not in self._known:
            made, given = latent[:, None].float() @ up.float().mT, key[..., :plain].float()
            if not bool((made - given).norm() <= UNLIKE * given.norm()):
                raise self._unlike(layer)
            self._known.add(layer)
        latent = latent[:, None]
        absorbed = torch.cat([query[..., :plain] @ up, query[..., plain:]], -1)
        return absorbed, torch.cat([latent, key[:, :1, :, plain:]], -1), latent

    def output(self, module: Any, sums: Tensor) -> Tensor:
        """The output of heads `[B, heads, T, dv]` of sums of latents `[B, heads, T, d]`."""
        return sums @ up_weights(module, self.block)[1].to(sums).mT

    def _unlike(self, layer: int) -> UnsupportedModel:
        return UnsupportedModel(
            f"layer {layer} of {self.block.id} does not make its keys from a latent as DeepSeek-V3"
            " does.",
            hint="its cache cannot be calibrated by this version",
        )


def up_weights(attention: Any, block: ModelBlock) -> tuple[Tensor, Tensor]:
    """W_UK `[heads, nope, d]` and W_UV `[heads, dv, d]`."""
    name = f"kv_b_proj of layer {attention.layer_idx} of {block.id}"
    weight = whole_weight(attention.kv_b_proj, name).unflatten(0, (block.num_q_heads, -1))
    plain = attention.qk_head_dim - (block.rotary_key or 0)
    return weight[:, :plain], weight[:, plain:]


def readers_of_latents(up: Tensor, out: Tensor) -> Tensor:
    """`[hidden, heads * d]`, the weights that read sums of latents, from W_UV and W_O, `[heads,
    hidden, dv]`."""
    return (out @ up).transpose(0, 1).flatten(1)


@contextmanager
def latents_of(model: Any, block: ModelBlock) -> Iterator[Latents | None]:
    """The latents of a model while the scope is open; `None` where its cache has heads."""
    if block.rotary_key is None:
        yield None
        return
    found = Latents(block)
    hooks = []
    for module in model.modules():
        if all(hasattr(module, name) for name in NAMES):
            keep = partial(found.keep, layer=module.layer_idx)
            hooks.append(module.kv_a_layernorm.register_forward_hook(keep))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
