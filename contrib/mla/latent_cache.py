"""The cache of a model with multi-head latent attention, for `SimulatedCache`.

A row is a latent c and a rotary key k. With the weights absorbed, all heads read the same rows: a
logit is (q W_UK) c^T + q_rope k^T, and the output is sum_s p_s c_s, to which each head applies its
W_UV. So the cache has one head, whose values are the latents of its keys, and one transform serves
both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tiny_model import RANK, ROPE
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry, Windows
from oscar_zoo.evaluate.simulated_cache import Reads, StoredSide, window_reads
from oscar_zoo.models.attention import AttentionFn, Softmax, attend, attention_scope
from oscar_zoo.models.loading import LoadedModel

WINDOWS = Windows(sink=64, recent=256)


@dataclass(frozen=True)
class Part:
    """Some channels of a row: their transform, `[d, d]` float32, and what a query reads of them;
    `bits` of a stored channel, with its share of scales."""

    forward: Tensor
    partner: Tensor
    read: Callable[[Tensor], Tensor]
    bits: float


@dataclass(frozen=True)
class Rows:
    """One side of one layer. Keys and values are the same rows; of a value only the latent is
    given back."""

    latent: Part
    rotary: Part
    values: bool
    mean: None = None

    @property
    def partner(self) -> Tensor:
        whole = torch.block_diag(self.latent.partner, self.rotary.partner)
        return whole[: len(self.latent.partner)] if self.values else whole

    def rows(self, x: Tensor) -> Tensor:
        return x.float() @ torch.block_diag(self.latent.forward, self.rotary.forward)

    def stored(self, rows: Tensor) -> Tensor:
        latent, rotary = rows.split([len(self.latent.forward), len(self.rotary.forward)], -1)
        return torch.cat([self.latent.read(latent), self.rotary.read(rotary)], -1)


@dataclass(frozen=True)
class LatentCache:
    """A cache for `SimulatedCache`: the latent and the rotary part of every layer."""

    layers: Mapping[int, tuple[Part, Part]]
    windows: Windows = WINDOWS

    def check(self, model: Geometry) -> None:
        assert tuple(self.layers) == model.attention_layers

    def sides(
        self, geometry: Geometry, layer_id: int, device: torch.device
    ) -> tuple[StoredSide, StoredSide]:
        latent, rotary = self.layers[layer_id]
        return Rows(latent, rotary, False), Rows(latent, rotary, True)

    def reads(self, positions: Tensor) -> Reads:
        return window_reads(self.windows, positions)

    @property
    def bits(self) -> float:
        """Bits of a channel of the latent, on average."""
        return sum(latent.bits for latent, _ in self.layers.values()) / len(self.layers)


def weights(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """W_UK `[heads, nope, rank]`, W_UV `[heads, dv, rank]` and W_O `[heads, hidden, dv]`."""
    at = layer.self_attn
    up = at.kv_b_proj.weight.detach().unflatten(0, (at.num_heads, -1))
    out = at.o_proj.weight.detach().unflatten(1, (at.num_heads, -1)).transpose(0, 1)
    return *up.split([at.qk_nope_head_dim, at.v_head_dim], 1), out


class Absorbed:
    """Attention with absorbed weights. `fn` gets queries `[1, heads, T, rank + rope]` and, as keys
    and as values, the rows of the cache in `dtype`; it gives the sums of latents."""

    def __init__(self, model: Any, fn: AttentionFn, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layers, self.fn, self.dtype = model.model.layers, fn, dtype
        self.latents: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            norm = layer.self_attn.kv_a_layernorm
            norm._forward_hooks.clear()
            norm.register_forward_hook(lambda _, __, out, i=i: self.latents.update({i: out}))

    def __call__(
        self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
    ) -> Tensor:
        up_k, up_v, _ = weights(self.layers[layer_id])
        width = up_k.shape[1]
        rows = torch.cat([self.latents[layer_id][:, None], key[:, :1, :, width:]], -1)
        rows = rows.to(self.dtype)
        absorbed = torch.cat([query[..., :width] @ up_k, query[..., width:]], -1)
        return self.fn(layer_id, absorbed, rows, rows, softmax) @ up_v.mT


def exact(layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
    """A cache in bfloat16."""
    rows = key.float().expand(-1, query.shape[1], -1, -1)
    return attend(query, rows, rows[..., :RANK].contiguous(), None, softmax)


@torch.inference_mode()
def run(model: Any, fn: AttentionFn, ids: Tensor) -> Tensor:
    """Logits `[T, vocabulary]` of one sequence."""
    loaded = LoadedModel(model, None, geometry(model), "float32")
    with attention_scope(loaded, Absorbed(model, fn)):
        return model(ids[None], use_cache=False).logits[0]


def geometry(model: Any) -> Geometry:
    layers = model.config.num_hidden_layers
    return Geometry(
        num_layers=layers,
        num_q_heads=model.config.num_attention_heads,
        num_kv_heads=1,
        head_dim=RANK + ROPE,
        v_head_dim=RANK,
        attention_layers=tuple(range(layers)),
    )
