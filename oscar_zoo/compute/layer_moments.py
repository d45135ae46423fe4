"""Streaming second moments of one layer: queries, keys, values and outputs.

They are all that a fit from moments needs, and no row is kept. One `LayerMoments` holds the float64
sums of one layer that owns a full-attention cache, with one leading axis of KV heads. Rows arrive
in any number of blocks. Sums of disjoint token sets add (`merge`). The value target `sst` weighs
each token by the energy of its key along the queries of the whole set, so its sums (`add_weighted`)
need a second pass over the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from oscar_zoo.compute.products import add_gram, add_sum, add_weighted_gram, same, symmetric
from oscar_zoo.errors import ComputeFailed

ROW_SUMS = ("qq", "kk", "k_sum", "vv", "v_sum", "oo")
"""Sums over rows; those of disjoint token sets add."""
WEIGHTED_SUMS = ("sst_num", "sst_den")
"""Sums whose weights come from the queries of the whole token set; they add only for one common
target."""
Need = Literal["rows", "weighted", "outputs", "weights"]
"""Kinds of sums that a fit may read: those of q, k and v; `sst_*`; `oo`; `wo`."""


@dataclass
class LayerMoments:
    """Sums over the tokens of one layer, per KV head; everything float64 on one device.

    Of a matrix the lower triangle counts; `products.symmetric` gives the whole.

    Attributes:
        qq: `[num_kv_heads, d, d]`, q^T q over all tokens and the query heads of the group, after
            RoPE.
        kk, k_sum: `[num_kv_heads, d, d]` and `[num_kv_heads, d]`, k^T k and k after RoPE.
        vv, v_sum: `[num_kv_heads, dv, dv]` and `[num_kv_heads, dv]`, v^T v and v.
        oo: `[num_kv_heads, dv, dv]`, o^T o over all tokens and the query heads of the group, o
            before o_proj.
        sst_num, sst_den: `[num_kv_heads, dv, dv]` and `[num_kv_heads]`, w v^T v and w with w = k A
            k^T.
        heads: the model's index of each KV head on the leading axis.
        wo: `[num_kv_heads, dv, dv]`, W_j^T W_j over the query heads of the group, W_j
            `[hidden, dv]` the columns of o_proj that read head j; `None` until `set_weights`.
        tokens: rows of k and v seen by each KV head.
        query_rows: rows of q summed into each KV head: group size times tokens.
        output_rows: rows of o summed into each KV head.
        weighted_tokens: rows in `sst_num`.
    """

    qq: Tensor
    kk: Tensor
    k_sum: Tensor
    vv: Tensor
    v_sum: Tensor
    oo: Tensor
    sst_num: Tensor
    sst_den: Tensor
    heads: tuple[int, ...]
    wo: Tensor | None = None
    tokens: int = 0
    query_rows: int = 0
    output_rows: int = 0
    weighted_tokens: int = 0

    @classmethod
    def zeros(
        cls,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        device: torch.device | str = "cpu",
        *,
        heads: Sequence[int] | None = None,
    ) -> Self:
        """Empty sums for some KV heads of one layer.

        `heads` are the model's indices of these heads; `None` stands for 0, 1, ...
        """

        def zero(*shape: int) -> Tensor:
            return torch.zeros(num_kv_heads, *shape, dtype=torch.float64, device=device)

        return cls(
            qq=zero(head_dim, head_dim),
            kk=zero(head_dim, head_dim),
            k_sum=zero(head_dim),
            vv=zero(v_head_dim, v_head_dim),
            v_sum=zero(v_head_dim),
            oo=zero(v_head_dim, v_head_dim),
            sst_num=zero(v_head_dim, v_head_dim),
            sst_den=zero(),
            heads=tuple(range(num_kv_heads) if heads is None else heads),
        )

    def add(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor | None = None) -> None:
        """Add the rows of one block of tokens.

        Args:
            query: `[num_q_heads, T, d]` after norm and RoPE, before scaling; query head j belongs
                to KV head j // g.
            key: `[num_kv_heads, T, d]` after norm and RoPE, heads not repeated.
            value: `[num_kv_heads, T, dv]`.
            output: `[num_q_heads, T, dv]` of attention, before any gate and o_proj; `None` leaves
                `oo` as it is.
        """
        self._check_rows(query, key, value, output)
        add_gram(self.qq, query)
        add_gram(self.kk, key)
        add_gram(self.vv, value)
        add_sum(self.k_sum, key)
        add_sum(self.v_sum, value)
        query_rows = query.shape[0] // len(self.heads) * query.shape[1]
        self.tokens += key.shape[1]
        self.query_rows += query_rows
        if output is not None:
            add_gram(self.oo, output)
            self.output_rows += query_rows

    def add_weighted(self, key: Tensor, value: Tensor, target: Tensor) -> None:
        """Add w v^T v and w = k A k^T for one block of tokens.

        Args:
            key: `[num_kv_heads, T, d]`, the same rows as in `add`.
            value: `[num_kv_heads, T, dv]`.
            target: A, `[num_kv_heads, d, d]` float64, of the whole token set: `estimators.qqt` of
                the finished sums.
        """
        add_weighted_gram(self.sst_num, self.sst_den, key, value, target)
        self.weighted_tokens += key.shape[1]

    def set_weights(self, o_proj: Tensor) -> None:
        """Compute `wo` from the output projection.

        Args:
            o_proj: `[hidden, num_q_heads * dv]`, columns in the order of the query heads,
                dequantized; a rank of a tensor-parallel group gives the columns of its own query
                heads.
        """
        heads, width = self.vv.shape[0], self.vv.shape[-1]
        if o_proj.dim() != 2 or o_proj.shape[1] % (heads * width):
            raise _do_not_fit(f"o_proj {tuple(o_proj.shape)}", self)
        wo = torch.zeros(self.vv.shape, dtype=torch.float64, device=o_proj.device)
        add_gram(wo, o_proj.unflatten(1, (-1, width)).transpose(0, 1))
        self.wo = symmetric(wo).to(self.vv.device)

    def merge(self, other: LayerMoments) -> None:
        """Add the sums of a disjoint token set of the same layer and heads."""
        if (
            self.heads != other.heads
            or self.kk.shape != other.kk.shape
            or self.vv.shape != other.vv.shape
        ):
            raise ComputeFailed(
                "moments of different heads do not add.", hint="use parts of one model"
            )
        if self.weighted_tokens or other.weighted_tokens:
            raise ComputeFailed(
                "moments cannot be merged after the weighted pass.",
                hint="merge first, then weigh all tokens",
            )
        if self.wo is not None and other.wo is not None and not same(self.wo, other.wo):
            raise ComputeFailed(
                "moments of different weights do not add.", hint="use one revision of one model"
            )
        for name in ROW_SUMS:
            getattr(self, name).add_(getattr(other, name).to(self.qq.device))
        self.wo = other.wo if self.wo is None else self.wo
        self.tokens += other.tokens
        self.query_rows += other.query_rows
        self.output_rows += other.output_rows

    def _check_rows(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor | None) -> None:
        heads, tokens, width = len(self.heads), key.shape[1], self.kk.shape[-1]
        fits = (
            key.shape == (heads, tokens, width)
            and value.shape == (heads, tokens, self.vv.shape[-1])
            and query.shape[0] % heads == 0
            and query.shape[1:] == (tokens, width)
            and (output is None or output.shape == (query.shape[0], tokens, self.vv.shape[-1]))
        )
        if not fits:
            shapes = f"q {tuple(query.shape)}, k {tuple(key.shape)}, v {tuple(value.shape)}"
            raise _do_not_fit(
                shapes if output is None else f"{shapes}, o {tuple(output.shape)}", self
            )


def _do_not_fit(shapes: str, layer: LayerMoments) -> ComputeFailed:
    return ComputeFailed(
        f"captured rows do not fit: {shapes} for {len(layer.heads)} KV heads.",
        hint="this attention layout is not supported",
    )
