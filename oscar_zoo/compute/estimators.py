"""The matrices that fits target, by versioned id, from moments.

The id names what is computed, not what a paper writes. `sst/1` weighs each value by its key's
energy along the mean query covariance, as the published code does. The paper's formula is the
second moment of attention outputs, `oo/1`. All results are float64, per KV head, and symmetric to
the bit; the form of a layer is the mean over its heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscar_zoo.artifact.formats import Grouping
from oscar_zoo.artifact.specs import StatisticName
from oscar_zoo.compute.layer_moments import LayerMoments
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.products import symmetric
from oscar_zoo.errors import ComputeFailed

Matrix = NDArray[np.float64]

_MIN_WEIGHT = 1e-12
"""Smallest total weight divided by (OSCAR, construction of the value covariance)."""


def qqt(layer: LayerMoments) -> Tensor:
    """`qqt/1`: `[n_kv, d, d]`, A_h = mean of q^T q over the group's query heads and all tokens."""
    return symmetric(layer.qq) / layer.query_rows


def sst(layer: LayerMoments) -> Tensor:
    """`sst/1`: `[n_kv, dv, dv]`, mean of v^T v with the weights w_t = k_t A_h k_t^T.

    C_h = sum_t w_t v_t^T v_t / max(sum_t w_t, 1e-12).

    One weight per token: no softmax, no scaling, not causal. A_h is `qqt` of the whole token set.
    """
    return symmetric(layer.sst_num) / layer.sst_den.clamp_min(_MIN_WEIGHT)[:, None, None]


def kk(layer: LayerMoments) -> Tensor:
    """`kk/1`: mean of k^T k; `[n_kv, d, d]`."""
    return symmetric(layer.kk) / layer.tokens


def vv(layer: LayerMoments) -> Tensor:
    """`vv/1`: mean of v^T v; `[n_kv, dv, dv]`."""
    return symmetric(layer.vv) / layer.tokens


def oo(layer: LayerMoments) -> Tensor:
    """`oo/1`: `[n_kv, dv, dv]`, mean of o^T o over the group's query heads and all tokens.

    o = sum_s p_s v_s is the output of a head, before o_proj.

    The rows of S V are the outputs of the heads, so this is V^T S^T S V of the paper without its
    score matrix.
    """
    return symmetric(layer.oo) / layer.output_rows


def wo(layer: LayerMoments) -> Tensor:
    """`wo/1`: `[n_kv, dv, dv]`, sum over the group's query heads of W_j^T W_j.

    W_j is the part of o_proj that reads head j: its output enters as o_j W_j^T.
    """
    if layer.wo is None:
        raise ComputeFailed("these moments have no output projection.", hint="capture again")
    return symmetric(layer.wo)


ESTIMATORS: Mapping[str, Callable[[LayerMoments], Tensor]] = MappingProxyType(
    {"kk/1": kk, "oo/1": oo, "qqt/1": qqt, "sst/1": sst, "vv/1": vv, "wo/1": wo}
)

TARGETS: Mapping[str, StatisticName] = MappingProxyType(
    {"kk/1": "kk", "oo/1": "oo", "qqt/1": "qq", "sst/1": "sst", "vv/1": "vv", "wo/1": "wo"}
)
"""Estimator -> name of its matrix in the statistics of an artifact."""


def estimate(moments: Moments, estimator: str, grouping: Grouping = "layer") -> Matrix:
    """One estimator over all layers, ascending by layer id.

    Args:
        grouping: `layer` for the mean over KV heads, `kv_head` for one matrix each.

    Returns:
        `[layers, d, d]` or `[layers, num_kv_heads, d, d]`, float64, exactly symmetric.
    """
    heads = [ESTIMATORS[estimator](moments.layers[layer]) for layer in sorted(moments.layers)]
    stacked = torch.stack(heads if grouping == "kv_head" else [matrix.mean(0) for matrix in heads])
    return np.asarray(stacked.cpu().numpy(), dtype=np.float64)
