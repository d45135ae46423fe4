"""`oscar`: one rotation R = U H P per layer and side, shared by all heads.

U diagonalizes the covariance of the queries for keys, and a weighted covariance of the values for
values.

Keys target `qqt/1`, values `sst/1`: the mean over KV heads of what the published code computes.

Source: OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization (arXiv
2605.17757).
"""

from __future__ import annotations

from oscar_zoo.artifact.manifest import Estimator, Estimators
from oscar_zoo.compute.methods.base import FittedPair, Method
from oscar_zoo.compute.methods.compose import R_H_PBR
from oscar_zoo.compute.methods.orthogonal import fit_shared
from oscar_zoo.compute.moments import Moments


def fit(moments: Moments) -> FittedPair:
    """Rotations of all layers, float32, with the float64 matrices they diagonalize."""
    return fit_shared(moments, "qqt/1", "sst/1")


METHOD = Method(
    name="oscar",
    variant=None,
    needs=frozenset({"rows", "weighted"}),
    estimators=Estimators(k=Estimator(id="qqt/1"), v=Estimator(id="sst/1")),
    composition=R_H_PBR,
    fit=fit,
)
