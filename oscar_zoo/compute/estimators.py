"""The matrices that fits target, by versioned id, from moments.

The id names what is computed, not what a paper writes: `sst/1` weighs each value by its key's energy along the mean
query covariance (the published code), while the paper's formula is the second moment of attention outputs. All
results are float64, per KV head, symmetrized here and nowhere else; the layer form is the mean over heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscar_zoo.artifact.formats import Grouping
from oscar_zoo.compute.moments import LayerMoments, Moments

Matrix = NDArray[np.float64]

_MIN_WEIGHT = 1e-12
"""Smallest total weight divided by (OSCAR, construction of the value covariance)."""


def qqt(layer: LayerMoments) -> Tensor:
    """`qqt/1`: A_h = sum over the group's query heads and tokens of q^T q, divided by their number; `[n_kv, d, d]`."""
    return _symmetric(layer.qq / layer.query_rows)


def sst(layer: LayerMoments) -> Tensor:
    """`sst/1`: C_h = sum_t w_t v_t^T v_t / max(sum_t w_t, 1e-12), w_t = k_t A_h k_t^T; `[n_kv, dv, dv]`.

    One weight per token: no softmax, no scaling, not causal. A_h is `qqt` of the whole token set.
    """
    return _symmetric(layer.sst_num / layer.sst_den.clamp_min(_MIN_WEIGHT)[:, None, None])


def kk(layer: LayerMoments) -> Tensor:
    """`kk/1`: mean of k^T k; `[n_kv, d, d]`."""
    return _symmetric(layer.kk / layer.tokens)


def vv(layer: LayerMoments) -> Tensor:
    """`vv/1`: mean of v^T v; `[n_kv, dv, dv]`."""
    return _symmetric(layer.vv / layer.tokens)


ESTIMATORS: Mapping[str, Callable[[LayerMoments], Tensor]] = MappingProxyType(
    {"kk/1": kk, "qqt/1": qqt, "sst/1": sst, "vv/1": vv}
)


def estimate(moments: Moments, estimator: str, grouping: Grouping = "layer") -> Matrix:
    """One estimator over all layers, ascending by layer id.

    Args:
        moments: with full coverage.
        estimator: a key of `ESTIMATORS`.
        grouping: `layer` for the mean over KV heads, `kv_head` for one matrix each.

    Returns:
        `[layers, d, d]` or `[layers, num_kv_heads, d, d]`, float64, exactly symmetric.
    """
    heads = [ESTIMATORS[estimator](moments.layers[layer]) for layer in sorted(moments.layers)]
    stacked = torch.stack(heads if grouping == "kv_head" else [matrix.mean(0) for matrix in heads])
    return np.asarray(stacked.cpu().numpy(), dtype=np.float64)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
