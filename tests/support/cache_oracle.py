"""The meaning of the INT2 cache in float64, token by token and without any state of the plugin.

`expected` gets everything a request computes and how it was cut into steps, and returns the
attention outputs. The tiers are written down here a second time, as sets of positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oscar_kernels.quantizer import affine_parameters, clip_rows, fake_quantize
from oscar_kernels.reference import attend
from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import LayerTransform, RotationSet
from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.engine import Softmax


@dataclass(frozen=True)
class Matrices:
    """One side of one layer per KV head, float64: `[heads, d, d]` and `[heads, d]`."""

    forward: Tensor
    partner: Tensor
    mean: Tensor


@dataclass(frozen=True)
class Cut:
    """How a request was computed: `prefix` tokens found in the cache, then extend steps, then one
    token per step."""

    chunks: Sequence[int]
    decode: int
    prefix: int = 0

    @property
    def total(self) -> int:
        return self.prefix + sum(self.chunks) + self.decode


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cut: Cut,
    pair_k: Matrices,
    pair_v: Matrices,
    *,
    specs: tuple[QuantSpec, QuantSpec],
    sink: int,
    recent: int,
    dtype: torch.dtype,
    softmax: Softmax,
) -> Tensor:
    """Outputs of positions `cut.prefix`, ...: `[tokens, num_q_heads, d]` float64; inputs
    `[total, heads, d]`. `specs` are of rows of K and of V."""
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    keys = torch.einsum("thd,hde->the", (k.double() - pair_k.mean), pair_k.forward)
    values = torch.einsum("thd,hde->the", v.double(), pair_v.forward)
    tiers = {
        "exact": (keys, values),
        "window": (keys.float().to(dtype).double(), values.float().to(dtype).double()),
        "int2": (
            fake_quantize(keys.float(), specs[0]).double(),
            fake_quantize(values.float(), specs[1]).double(),
        ),
    }
    out = []
    for p in range(cut.prefix, cut.total):
        source = [where(s, p, cut, sink=sink, recent=recent) for s in range(p + 1)]
        for head in range(q.shape[1]):
            h = head // group
            key = torch.stack([tiers[t][0][s, h] for s, t in enumerate(source)])
            value = torch.stack([tiers[t][1][s, h] for s, t in enumerate(source)])
            products = (q[p, head].double() @ pair_k.partner[h]) @ key.T
            weights = _weights(products, q[p, head].double() @ pair_k.mean[h], softmax, head)
            out.append((weights @ value) @ pair_v.partner[h].T)
    return torch.stack(out).unflatten(0, (cut.total - cut.prefix, q.shape[1]))


def _weights(products: Tensor, mean: Tensor, softmax: Softmax, head: int) -> Tensor:
    """Weights of the tokens from products with centred keys and the product with their mean."""
    logits = (products + mean) * softmax.scale
    if softmax.cap:
        logits = softmax.cap * torch.tanh(logits / softmax.cap)
    if softmax.sinks is None:
        return logits.softmax(-1)
    return torch.cat([logits, softmax.sinks[head, None].double()]).softmax(-1)[:-1]


def near_a_tie(x: Tensor, pair: Matrices, spec: QuantSpec, margin: float = 1e-4) -> Tensor:
    """`[tokens]` bool: tokens with a value so close to a rounding tie that float32 may round it
    either way."""
    rows = clip_rows(torch.einsum("thd,hde->the", x.double() - pair.mean, pair.forward), spec)
    scale, offset = affine_parameters(rows, spec)
    groups = rows.unflatten(-1, (spec.num_groups, spec.group_size))
    steps = (groups - offset[..., None]) / scale[..., None] + 0.5
    return ((steps - steps.round()).abs() < margin).flatten(1).any(1)


def where(s: int, p: int, cut: Cut, *, sink: int, recent: int) -> str:
    """Which tier the query at position `p` reads position `s <= p` from."""
    start = cut.prefix
    for chunk in cut.chunks:
        if start <= p < start + chunk:
            if s >= start:
                return "exact"
            return "window" if cut.prefix <= s and (s < sink or s >= start - recent) else "int2"
        start += chunk
    return "window" if cut.prefix <= s and (s < sink or s > p - recent) else "int2"


def general_set(role: str, layers: int, heads: int, dim: int, *, seed: int) -> RotationSet:
    """A format-3 set per KV head: not orthogonal, and centred when it is for keys."""
    random = np.random.default_rng(seed)

    def layer(index: int) -> LayerTransform:
        left, right = (np.linalg.qr(random.standard_normal((heads, dim, dim)))[0] for _ in range(2))
        stretch = np.linspace(0.5, 2.0, dim)
        forward, partner = left * stretch @ right, left / stretch @ right
        mean = random.standard_normal((heads, dim)) if role == "k" else None
        return LayerTransform(
            index,
            forward.astype(np.float32),
            partner.astype(np.float32),
            None if mean is None else mean.astype(np.float32),
        )

    objective = "qqt_wush" if role == "k" else "sst_wush"
    return RotationSet(
        3,
        objective,
        "kv_head",
        "wush",
        False,
        role == "k",
        tuple(layer(i) for i in range(layers)),
        {},
    )


def matrices(rotations: RotationSet, layer: int, heads: int) -> Matrices:
    """One layer of a set for the oracle."""
    entry, dim = rotations.layers[layer], rotations.head_dim

    def spread(array: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.array(array, dtype=np.float64)).expand(shape)

    mean = np.zeros(dim) if entry.mean is None else entry.mean
    return Matrices(
        spread(entry.forward, (heads, dim, dim)),
        spread(entry.partner, (heads, dim, dim)),
        spread(mean, (heads, dim)),
    )


class PlainPrefill:
    """Dense attention in float32, with log-sum-exps to base 2 as FlashInfer's are."""

    lse_unit = math.log(2)

    def begin(self, batch: Batch) -> None:
        """See `Prefill`."""
        self._begun = batch

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
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
