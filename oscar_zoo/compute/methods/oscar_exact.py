"""`oscar-exact`: like `oscar`, but values target the covariance that the paper defines.

The published code uses another one. `oo/1` is V^T S^T S V with the causal softmax scores S. The
rows of S V are the outputs of the heads, so this matrix streams like any other second moment and
needs no second pass over the data.

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
    return fit_shared(moments, "qqt/1", "oo/1")


METHOD = Method(
    name="oscar-exact",
    variant="exact",
    needs=frozenset({"rows", "outputs"}),
    estimators=Estimators(k=Estimator(id="qqt/1"), v=Estimator(id="oo/1")),
    composition=R_H_PBR,
    fit=fit,
)
