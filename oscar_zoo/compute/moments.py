"""Streaming second moments of queries, keys and values: all that any fit needs, without keeping a single row.

One `LayerMoments` per layer that owns a full-attention cache, sums in float64 with one leading axis of KV heads. Rows
arrive in any number of blocks; sums of disjoint token sets add. The value target `sst` weighs each token by the key's
energy along the queries of the whole set, so its sums need a second pass over the same tokens (`add_weighted`).
`Moments.check_coverage` must pass before a fit: a head that was never observed still gives a file that looks valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import ComputeFailed

CHUNK_ROWS = 1024
"""Rows cast to float64 and multiplied at once."""


@dataclass
class LayerMoments:
    """Sums over the tokens of one layer, per KV head; everything float64 on one device.

    Attributes:
        qq: `[num_kv_heads, d, d]`, q^T q over all tokens and the query heads of the group, after RoPE.
        kk, k_sum: `[num_kv_heads, d, d]` and `[num_kv_heads, d]`, k^T k and k after RoPE.
        vv, v_sum: `[num_kv_heads, dv, dv]` and `[num_kv_heads, dv]`, v^T v and v.
        sst_num, sst_den: `[num_kv_heads, dv, dv]` and `[num_kv_heads]`, w v^T v and w with w = k A k^T.
        tokens: rows of k and v seen by each KV head.
        query_rows: rows of q summed into each KV head: group size times tokens.
        weighted_tokens: rows in `sst_num`.
    """

    qq: Tensor
    kk: Tensor
    k_sum: Tensor
    vv: Tensor
    v_sum: Tensor
    sst_num: Tensor
    sst_den: Tensor
    tokens: int = 0
    query_rows: int = 0
    weighted_tokens: int = 0

    @classmethod
    def zeros(cls, num_kv_heads: int, head_dim: int, v_head_dim: int, device: torch.device | str = "cpu") -> Self:
        """Empty sums."""

        def zero(*shape: int) -> Tensor:
            return torch.zeros(num_kv_heads, *shape, dtype=torch.float64, device=device)

        return cls(
            qq=zero(head_dim, head_dim),
            kk=zero(head_dim, head_dim),
            k_sum=zero(head_dim),
            vv=zero(v_head_dim, v_head_dim),
            v_sum=zero(v_head_dim),
            sst_num=zero(v_head_dim, v_head_dim),
            sst_den=zero(),
        )

    def add(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Add the rows of one block of tokens.

        Args:
            query: `[num_q_heads, T, d]` after norm and RoPE, before scaling; query head j belongs to KV head j // g.
            key: `[num_kv_heads, T, d]` after norm and RoPE, heads not repeated.
            value: `[num_kv_heads, T, dv]`.

        Raises:
            ComputeFailed: heads or rows do not fit each other.
        """
        heads, tokens = key.shape[0], key.shape[1]
        fits = heads == self.kk.shape[0] and query.shape[0] % heads == 0
        if not fits or query.shape[1] != tokens or value.shape[:2] != key.shape[:2]:
            raise ComputeFailed(
                f"captured rows do not fit: q {tuple(query.shape)}, k {tuple(key.shape)}, v {tuple(value.shape)} "
                f"for {self.kk.shape[0]} KV heads.",
                hint="this attention layout is not supported",
            )
        rows = query.unflatten(0, (heads, -1)).flatten(1, 2)
        self.qq += _gram(rows)
        self.kk += _gram(key)
        self.vv += _gram(value)
        self.k_sum += key.sum(1, dtype=torch.float64)
        self.v_sum += value.sum(1, dtype=torch.float64)
        self.tokens += tokens
        self.query_rows += rows.shape[1]

    def add_weighted(self, key: Tensor, value: Tensor, target: Tensor) -> None:
        """Add w v^T v and w = k A k^T for one block of tokens.

        Args:
            key: `[num_kv_heads, T, d]`, the same rows as in `add`.
            value: `[num_kv_heads, T, dv]`.
            target: A, `[num_kv_heads, d, d]` float64, of the whole token set.
        """
        for k, v in zip(key.split(CHUNK_ROWS, 1), value.split(CHUNK_ROWS, 1), strict=True):
            k, v = k.double(), v.double()
            weight = ((k @ target) * k).sum(-1)
            self.sst_num += (weight[..., None] * v).mT @ v
            self.sst_den += weight.sum(-1)
        self.weighted_tokens += key.shape[1]

    def merge(self, other: LayerMoments) -> None:
        """Add the sums of a disjoint token set of the same layer.

        Raises:
            ComputeFailed: either side already has weighted sums, whose weights knew only its own queries.
        """
        if self.weighted_tokens or other.weighted_tokens:
            raise ComputeFailed(
                "moments cannot be merged after the weighted pass.", hint="merge first, then weigh all tokens"
            )
        for name in ("qq", "kk", "k_sum", "vv", "v_sum"):
            getattr(self, name).add_(getattr(other, name))
        self.tokens += other.tokens
        self.query_rows += other.query_rows


@dataclass(frozen=True)
class Moments:
    """The sums of all layers of one model.

    Attributes:
        geometry: of the model; says which layers and heads there must be.
        layers: by decoder layer index; empty when a method needs no data.
    """

    geometry: Geometry
    layers: Mapping[int, LayerMoments]

    @classmethod
    def zeros(cls, geometry: Geometry, device: torch.device | str = "cpu") -> Self:
        """Empty sums for every layer of `geometry`."""
        shape = (geometry.num_kv_heads, geometry.head_dim, geometry.v_head_dim)
        return cls(geometry, {layer: LayerMoments.zeros(*shape, device) for layer in geometry.attention_layers})

    @property
    def tokens(self) -> int:
        """Tokens every layer saw, once `check_coverage` passed; 0 without layers."""
        return min((layer.tokens for layer in self.layers.values()), default=0)

    def check_coverage(self, *, weighted: bool) -> None:
        """Prove that every layer and head of the model was observed, equally often and with finite energy.

        Args:
            weighted: whether the second pass must have run as well.

        Raises:
            ComputeFailed: anything is missing; a fit would look valid and be wrong.
        """
        geometry = self.geometry
        if tuple(sorted(self.layers)) != geometry.attention_layers:
            missing = sorted(set(geometry.attention_layers) ^ set(self.layers))
            raise _uncovered(f"layers {missing} were captured or expected, not both")
        first = next(iter(self.layers.values())).tokens
        for layer_id, layer in self.layers.items():
            _check_layer(layer_id, layer, geometry, tokens=first, weighted=weighted)


def _check_layer(layer_id: int, layer: LayerMoments, geometry: Geometry, *, tokens: int, weighted: bool) -> None:
    heads = geometry.num_kv_heads
    group = geometry.num_q_heads // heads
    if layer.kk.shape[0] != heads:
        raise _uncovered(f"layer {layer_id} has {layer.kk.shape[0]} KV heads, the model {heads}")
    if layer.tokens == 0 or layer.tokens != tokens:
        raise _uncovered(f"layer {layer_id} saw {layer.tokens} tokens, another layer {tokens}")
    if layer.query_rows != group * layer.tokens:
        raise _uncovered(f"layer {layer_id} saw {layer.query_rows} query rows, expected {group} x {layer.tokens}")
    if weighted and layer.weighted_tokens != layer.tokens:
        raise _uncovered(f"layer {layer_id} weighed {layer.weighted_tokens} of {layer.tokens} tokens")
    for name in ("qq", "kk", "vv", *(["sst_num"] if weighted else [])):
        trace = torch.diagonal(getattr(layer, name), dim1=-2, dim2=-1).sum(-1)
        bad = ~(torch.isfinite(trace) & (trace > 0))
        if bool(bad.any()):
            head = int(bad.nonzero()[0])
            raise _uncovered(f"layer {layer_id}, KV head {head}: trace of {name} is {float(trace[head]):.3g}")


def _gram(rows: Tensor) -> Tensor:
    """Sum of x^T x over the rows of each head: `[heads, N, d]` any float dtype to `[heads, d, d]` float64."""
    total = torch.zeros(rows.shape[0], rows.shape[-1], rows.shape[-1], dtype=torch.float64, device=rows.device)
    for chunk in rows.split(CHUNK_ROWS, 1):
        x = chunk.double()
        total += x.mT @ x
    return total


def _uncovered(what: str) -> ComputeFailed:
    return ComputeFailed(f"the capture is incomplete: {what}.", hint="nothing was written; report the model")
