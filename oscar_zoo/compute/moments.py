"""Streaming second moments of queries, keys, values and outputs: all that a fit from moments needs.

No row is kept. `LayerMoments` holds the float64 sums of one layer that owns a full-attention cache,
with one leading axis of KV heads. Rows arrive in any number of blocks, and sums of disjoint token
sets add. The value target `sst` weighs each token by the energy of its key along the queries of the
whole set, so its sums need a second pass. `Moments.check` comes before every fit: a head that was
never observed still gives a file that looks valid.

`estimate` makes of the sums the matrices that fits target, by versioned id. The id names what is
computed, not what a paper writes: `sst/1` is the published code's, `oo/1` the paper's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscar_zoo.artifact.formats import Grouping
from oscar_zoo.artifact.manifest import Coverage
from oscar_zoo.artifact.specs import Geometry, StatisticName, Windows
from oscar_zoo.compute.products import add_gram, add_sum, add_weighted_gram, same, symmetric
from oscar_zoo.errors import ComputeFailed

Matrix = NDArray[np.float64]
ROW_SUMS = ("qq", "kk", "k_sum", "vv", "v_sum", "oo")
"""Sums over rows; those of disjoint token sets add."""
WEIGHTED_SUMS = ("sst_num", "sst_den")
"""Sums whose weights come from the queries of the whole token set; they add only for one common
target."""
COUNTS = ("tokens", "query_rows", "output_rows", "weighted_tokens")
Need = Literal["rows", "weighted", "outputs", "weights"]
"""Kinds of sums that a fit may read: those of q, k and v; `sst_*`; `oo`; `wo`."""
_BROKEN = "the model computes nothing there that can be calibrated; try --dtype float32"
LOSS_WINDOWS = Windows(sink=64, recent=256)
"""Rows whose errors cost nothing, because a cache has them in high precision."""
LOGITS_AT_ONCE = 1 << 23
"""Of `row_loss`: 32 MB for each of a few tensors; more where one head has more."""
_MIN_WEIGHT = 1e-12
"""Smallest total weight divided by (OSCAR, construction of the value covariance)."""


@dataclass
class LayerMoments:
    """Sums over the tokens of one layer, per KV head; everything float64 on one device.

    Of a matrix the lower triangle counts; `products.symmetric` gives the whole. q and k are after
    RoPE, o is before o_proj, and the query heads of a group are added up. With w = k A k^T:

    Attributes:
        qq, kk: `[num_kv_heads, d, d]`, q^T q and k^T k; k_sum: `[num_kv_heads, d]`. Of latents,
            which are keys and values at once, qq is the `row_loss`.
        vv, oo: `[num_kv_heads, dv, dv]`, v^T v and o^T o; v_sum: `[num_kv_heads, dv]`.
        sst_num, sst_den: `[num_kv_heads, dv, dv]` and `[num_kv_heads]`, w v^T v and w.
        wo: `[num_kv_heads, dv, dv]`, W_j^T W_j over the query heads of the group, W_j
            `[hidden, dv]` the columns of o_proj that read head j; `None` until `set_weights`.
        tokens: rows of k and v seen by each KV head; `query_rows` and `output_rows` are group size
            times that, `weighted_tokens` the rows in `sst_num`.
    """

    qq: Tensor
    kk: Tensor
    k_sum: Tensor
    vv: Tensor
    v_sum: Tensor
    oo: Tensor
    sst_num: Tensor
    sst_den: Tensor
    wo: Tensor | None = None
    tokens: int = 0
    query_rows: int = 0
    output_rows: int = 0
    weighted_tokens: int = 0

    @classmethod
    def zeros(
        cls, num_kv_heads: int, head_dim: int, v_head_dim: int, device: torch.device | str = "cpu"
    ) -> Self:
        """Empty sums."""
        d, dv = head_dim, v_head_dim
        shapes = ((d, d), (d, d), (d,), (dv, dv), (dv,), (dv, dv), (dv, dv), ())
        return cls(
            *(
                torch.zeros(num_kv_heads, *shape, dtype=torch.float64, device=device)
                for shape in shapes
            )
        )

    def add(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor | None = None,
        loss: Tensor | None = None,
    ) -> None:
        """Add the rows of one block of tokens.

        Args:
            query: `[num_q_heads, T, d]` after norm and RoPE, before scaling; query head j belongs
                to KV head j // g.
            key: `[num_kv_heads, T, d]` after norm and RoPE, heads not repeated.
            value: `[num_kv_heads, T, dv]`.
            output: `[num_q_heads, T, dv]` of attention, before any gate and o_proj; `None` leaves
                `oo` as it is.
            loss: `row_loss`, of latents.
        """
        self._check_rows(query, key, value, output)
        if loss is None:
            add_gram(self.qq, query)
        else:
            self.qq += loss
        add_gram(self.kk, key)
        add_gram(self.vv, value)
        add_sum(self.k_sum, key)
        add_sum(self.v_sum, value)
        query_rows = query.shape[0] // key.shape[0] * query.shape[1]
        self.tokens += key.shape[1]
        self.query_rows += query_rows
        if output is not None:
            add_gram(self.oo, output)
            self.output_rows += query_rows

    def add_weighted(self, key: Tensor, value: Tensor, target: Tensor) -> None:
        """Add w v^T v and w = k A k^T for one block of tokens, whose rows are those of `add`.
        `target` is A, `[num_kv_heads, d, d]` float64: `qqt` of the sums of the whole token set."""
        add_weighted_gram(self.sst_num, self.sst_den, key, value, target)
        self.weighted_tokens += key.shape[1]

    def set_weights(self, o_proj: Tensor) -> None:
        """Compute `wo` from the output projection `[hidden, num_q_heads * dv]`, dequantized, its
        columns in the order of the query heads."""
        heads, width = self.vv.shape[0], self.vv.shape[-1]
        if o_proj.dim() != 2 or o_proj.shape[1] % (heads * width):
            raise self._do_not_fit(f"o_proj {tuple(o_proj.shape)}")
        wo = torch.zeros(self.vv.shape, dtype=torch.float64, device=o_proj.device)
        add_gram(wo, o_proj.unflatten(1, (-1, width)).transpose(0, 1))
        self.wo = symmetric(wo).to(self.vv.device)

    def merge(self, other: LayerMoments) -> None:
        """Add the sums of a disjoint token set of the same layer and heads, before the weighted
        pass."""
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
        (heads, width, _), tokens, v_width = self.kk.shape, key.shape[1], self.vv.shape[-1]
        fits = (
            key.shape == (heads, tokens, width)
            and value.shape == (heads, tokens, v_width)
            and query.shape[0] % heads == 0
            and query.shape[1:] == (tokens, width)
            and (output is None or output.shape == (query.shape[0], tokens, v_width))
        )
        if not fits:
            rows = {"q": query, "k": key, "v": value} | ({} if output is None else {"o": output})
            shapes = [f"{name} {tuple(some.shape)}" for name, some in rows.items()]
            raise self._do_not_fit(", ".join(shapes))

    def _do_not_fit(self, shapes: str) -> ComputeFailed:
        return ComputeFailed(
            f"captured rows do not fit: {shapes} for {len(self.kk)} KV heads.",
            hint="this attention layout is not supported",
        )


@dataclass(frozen=True)
class Moments:
    """The sums of all layers of one model, or of a part of it, by decoder layer index; `geometry`
    says which layers and heads there must be."""

    geometry: Geometry
    layers: Mapping[int, LayerMoments]

    @property
    def tokens(self) -> int:
        """Tokens every layer saw, once `check` passed; 0 without layers."""
        return min((layer.tokens for layer in self.layers.values()), default=0)

    def merge(self, other: Moments) -> None:
        """Add a disjoint token set of the same layers and heads; see `LayerMoments.merge`."""
        if self.geometry != other.geometry or self.layers.keys() != other.layers.keys():
            raise ComputeFailed(
                "moments of different layers do not add.", hint="use parts of one model"
            )
        for layer_id, layer in self.layers.items():
            layer.merge(other.layers[layer_id])

    def check(self, needs: Set[Need]) -> None:
        """Prove that every layer and head of the model saw the same tokens, with finite energy, in
        every sum that `needs` names."""
        if not needs:
            return
        layers = self.geometry.attention_layers
        if tuple(sorted(self.layers)) != layers:
            missing = sorted(set(layers) ^ set(self.layers))
            raise ComputeFailed.incomplete(f"layers {missing} were captured or expected, not both")
        first = next(iter(self.layers.values())).tokens
        for layer_id, layer in self.layers.items():
            self._check_counts(layer_id, layer, first, needs)
            _check_traces(layer_id, layer, needs)

    def _check_counts(
        self, layer_id: int, layer: LayerMoments, tokens: int, needs: Set[Need]
    ) -> None:
        """Refuse a layer in which a head missed tokens or queries, or a sum that `needs` names."""
        heads = self.geometry.num_kv_heads
        group = self.geometry.num_q_heads // heads
        wrong = None
        if len(layer.kk) != heads:
            wrong = f"has {len(layer.kk)} KV heads, the model {heads}"
        elif layer.tokens == 0 or layer.tokens != tokens:
            wrong = f"saw {layer.tokens} tokens, another layer {tokens}"
        elif self.geometry.rotary_key and not float(torch.diagonal(layer.qq[0]).sum()) > 0:
            wrong = "has no query that reads a row behind the windows"
        elif layer.query_rows != group * tokens:
            wrong = f"saw {layer.query_rows} query rows, expected {group} x {tokens}"
        elif "weighted" in needs and layer.weighted_tokens != tokens:
            wrong = f"weighed {layer.weighted_tokens} of {tokens} tokens"
        elif "outputs" in needs and layer.output_rows != group * tokens:
            wrong = f"saw {layer.output_rows} output rows, expected {group} x {tokens}"
        elif "weights" in needs and layer.wo is None:
            wrong = "has no output projection"
        if wrong is not None:
            raise ComputeFailed.incomplete(f"layer {layer_id} {wrong}")

    def needs_met(self) -> frozenset[Need]:
        """Every kind of sum that some layer holds; `check` decides whether it is complete."""
        layers = self.layers.values()
        met: dict[Need, bool] = {
            "rows": any(layer.tokens for layer in layers),
            "weighted": any(layer.weighted_tokens for layer in layers),
            "outputs": any(layer.output_rows for layer in layers),
            "weights": any(layer.wo is not None for layer in layers),
        }
        return frozenset(need for need, there in met.items() if there)

    def observed(self, *, tp: int = 1, pp: int = 1, dp: int = 1) -> Coverage:
        """The coverage block of a manifest; `dp` parts of the tokens were captured apart."""
        counts = [layer.tokens for layer in self.layers.values()]
        heads = self.geometry.num_kv_heads
        return Coverage(
            layers=len(self.layers),
            q_heads=heads * (self.geometry.num_q_heads // heads),
            kv_heads=heads,
            tokens_min=min(counts),
            tokens_max=max(counts),
            tp=tp,
            pp=pp,
            dp=dp,
        )


def _check_traces(layer_id: int, layer: LayerMoments, needs: Set[Need]) -> None:
    """Refuse a layer in which a head has no finite, positive energy in a sum of `needs`."""
    optional: Mapping[Need, str] = {"weighted": "sst_num", "outputs": "oo", "weights": "wo"}
    for name in ("qq", "kk", "vv", *(optional[need] for need in optional if need in needs)):
        trace = torch.diagonal(getattr(layer, name), dim1=-2, dim2=-1).sum(-1)
        bad = ~(torch.isfinite(trace) & (trace > 0))
        if bool(bad.any()):
            head = int(bad.nonzero()[0])
            value = float(trace[head])
            raise ComputeFailed(
                f"layer {layer_id}, KV head {head}: trace of {name} is {value:.3g}.", hint=_BROKEN
            )


def row_loss(query: Tensor, rows: Tensor, scaling: float, up: Tensor, out: Tensor) -> Tensor:
    """What an error of a latent costs: H, `[1, d, d]` float64, of which the lower triangle counts.
    Arguments as of `row_losses`."""
    parts = row_losses(query, rows, scaling, up, out, LOSS_WINDOWS)
    return sum(parts, torch.zeros_like(parts[0]))[:, : up.shape[-1], : up.shape[-1]]


def row_losses(
    query: Tensor, rows: Tensor, scaling: float, up: Tensor, out: Tensor, windows: Windows
) -> tuple[Tensor, Tensor, Tensor]:
    """What an error of a row, a latent and a rotary key, costs as a key and as a value, and what it
    costs as both, beside: three times `[1, d + rope, d + rope]` float64; see `row_loss`.

    To first order an error e of the row at s moves the output of head h at t by p e W_UV W_O as a
    value, and by scaling p (q e^T) (c_s - o_t) W_UV W_O as a key, with p the weight of the row and
    o the sum of latents. The square of both together is e H e^T, with M = W_UV W_O W_O^T W_UV^T and

        H = sum p^2 (scaling^2 |c_s - o_t|_M^2 q^T q + M + scaling (q^T (c_s - o_t) M + transposed))

    over heads, queries and the rows that they read behind the windows. No free number weighs keys
    against values.

    Args:
        query: `[heads, T, d + rope]`, and `rows`, `[T, d + rope]`, of one sequence.
        up, out: W_UV, `[heads, dv, d]`, and W_O, `[heads, hidden, dv]`.
    """
    d, rows = up.shape[-1], rows.float()
    latents, at = rows[:, :d], torch.arange(len(rows), device=rows.device)
    age, shape = at[:, None] - at, (1, rows.shape[1], rows.shape[1])
    behind = (age >= windows.recent) & (at >= windows.sink)
    keys, values, both = (rows.new_zeros(shape, dtype=torch.float64) for _ in range(3))
    size = max(1, LOGITS_AT_ONCE // len(rows) ** 2)
    for q, of_values, of_output in zip(*(x.split(size) for x in (query, up, out)), strict=True):
        q, effect = q.float(), of_values.mT @ (of_output.mT @ of_output) @ of_values  # M
        p = (scaling * (q @ rows.mT)).masked_fill(age < 0, -torch.inf).softmax(-1)
        sums, squares = p @ latents, p.square() * behind
        number, seen = squares.sum(-1, keepdim=True), squares @ latents
        far = (squares * (latents @ effect * latents).sum(-1)[:, None]).sum(-1, keepdim=True)
        far = far + ((number * sums - 2 * seen) @ effect * sums).sum(-1, keepdim=True)
        add_gram(keys, scaling * q * far.clamp_min(0).sqrt())
        values[0, :d, :d] += (number.sum(1, keepdim=True) * effect).sum(0)
        turned = scaling * (q.mT @ ((seen - number * sums) @ effect)).sum(0).double()
        both[0, :, :d] += turned
        both[0, :d] += turned.mT
    return keys, values, both


def check_finite(layer_id: int, layer: LayerMoments) -> None:
    """Refuse a layer in which any sum has a NaN or infinite entry."""
    for name in ("qq", "kk", "vv", "oo", "sst_num", "sst_den", "wo"):
        tensor = getattr(layer, name)
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise ComputeFailed(
                f"layer {layer_id}: {name} has NaN or infinite values.", hint=_BROKEN
            )


def qqt(layer: LayerMoments) -> Tensor:
    """`qqt/1`: `[n_kv, d, d]`, A_h = mean of q^T q over the group's query heads and all tokens."""
    return symmetric(layer.qq) / layer.query_rows


def sst(layer: LayerMoments) -> Tensor:
    """`sst/1`: `[n_kv, dv, dv]`, mean of v^T v with the weights w_t = k_t A_h k_t^T. C_h = sum_t
    w_t v_t^T v_t / max(sum_t w_t, 1e-12): one weight per token, no softmax, no scaling, not causal.
    A_h is `qqt` of the whole token set."""
    return symmetric(layer.sst_num) / layer.sst_den.clamp_min(_MIN_WEIGHT)[:, None, None]


def oo(layer: LayerMoments) -> Tensor:
    """`oo/1`: `[n_kv, dv, dv]`, mean of o^T o over the group's query heads and all tokens. o =
    sum_s p_s v_s is the output of a head, before o_proj. The rows of S V are these outputs, so this
    is V^T S^T S V of the paper without its score matrix."""
    return symmetric(layer.oo) / layer.output_rows


def wo(layer: LayerMoments) -> Tensor:
    """`wo/1`: `[n_kv, dv, dv]`, sum over the group's query heads of W_j^T W_j. W_j is the part of
    o_proj that reads head j: its output enters as o_j W_j^T."""
    if layer.wo is None:
        raise ComputeFailed("these moments have no output projection.", hint="capture again")
    return symmetric(layer.wo)


ESTIMATORS: Mapping[str, Callable[[LayerMoments], Tensor]] = {
    "latent-loss/1": qqt,
    "kk/1": lambda layer: symmetric(layer.kk) / layer.tokens,  # mean of k^T k
    "oo/1": oo,
    "qqt/1": qqt,
    "sst/1": sst,
    "vv/1": lambda layer: symmetric(layer.vv) / layer.tokens,  # mean of v^T v
    "wo/1": wo,
}
TARGETS: Mapping[str, StatisticName] = {
    "latent-loss/1": "qq",
    "kk/1": "kk",
    "oo/1": "oo",
    "qqt/1": "qq",
    "sst/1": "sst",
    "vv/1": "vv",
    "wo/1": "wo",
}
"""Estimator -> name of its matrix in the statistics of an artifact."""


def estimate(moments: Moments, estimator: str, grouping: Grouping = "layer") -> Matrix:
    """One estimator over all layers, ascending by layer id. `[layers, d, d]`, the mean over KV
    heads, or with `kv_head` `[layers, num_kv_heads, d, d]`; float64, exactly symmetric."""
    heads = [ESTIMATORS[estimator](moments.layers[layer]) for layer in sorted(moments.layers)]
    stacked = torch.stack(heads if grouping == "kv_head" else [matrix.mean(0) for matrix in heads])
    return np.asarray(stacked.cpu().numpy(), dtype=np.float64)
