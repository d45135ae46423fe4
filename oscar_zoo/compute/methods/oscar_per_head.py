"""`oscar-per-head`: the rotation of `oscar`, one per KV head instead of one per layer.

When the heads of a layer attend to different channels, their mean covariance is nearly flat and a
shared rotation gains nothing. One matrix per head costs memory, and formats that share one matrix
cannot hold it.

Source: OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization (arXiv
2605.17757).
"""

from __future__ import annotations

from oscar_zoo.artifact.manifest import Estimator, Estimators
from oscar_zoo.compute.methods.base import FittedPair, Method
from oscar_zoo.compute.methods.compose import R_H_PBR
from oscar_zoo.compute.methods.orthogonal import fit_per_head
from oscar_zoo.compute.moments import Moments


def fit(moments: Moments) -> FittedPair:
    """Rotations of all layers and heads, float32, with the float64 matrices they diagonalize."""
    return fit_per_head(moments, "qqt/1", "sst/1")


METHOD = Method(
    name="oscar-per-head",
    variant="per-head",
    needs=frozenset({"rows", "weighted"}),
    estimators=Estimators(k=Estimator(id="qqt/1"), v=Estimator(id="sst/1")),
    composition=R_H_PBR,
    fit=fit,
)
