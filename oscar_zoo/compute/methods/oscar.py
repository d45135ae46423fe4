"""`oscar`: one orthogonal matrix per layer and side, R = U H P of the query and of the weighted value covariance.

Keys target `qqt/1`, values `sst/1`: the mean over KV heads of what the published code computes.

Source: OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization (arXiv 2605.17757).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, RotationSet
from oscar_zoo.artifact.manifest import Estimator, Estimators
from oscar_zoo.compute.estimators import estimate
from oscar_zoo.compute.methods.base import FittedPair, Method
from oscar_zoo.compute.methods.compose import R_H_PBR, r_h_pbr
from oscar_zoo.compute.moments import Moments


def fit(moments: Moments) -> FittedPair:
    """Rotations of all layers, float32, with the float64 matrices they diagonalize."""
    layer_ids = tuple(sorted(moments.layers))
    queries, values = estimate(moments, "qqt/1"), estimate(moments, "sst/1")
    return FittedPair(
        k=_side("qqt_r_h_pbr", layer_ids, queries),
        v=_side("sst_r_h_pbr", layer_ids, values),
        targets={"qq": queries, "sst": values},
    )


def _side(objective: str, layer_ids: tuple[int, ...], covariances: NDArray[np.float64]) -> RotationSet:
    return RotationSet(
        format_version=1,
        objective=objective,
        grouping="layer",
        transform="oscar",
        orthogonal=True,
        centered=False,
        layers=tuple(_layer(layer, matrix) for layer, matrix in zip(layer_ids, covariances, strict=True)),
    )


def _layer(layer_id: int, covariance: NDArray[np.float64]) -> LayerTransform:
    rotation, eigenvalues = r_h_pbr(covariance)
    stored = np.ascontiguousarray(rotation, dtype=np.float32)
    return LayerTransform(layer_id, stored, stored, eigenvalues=eigenvalues.astype(np.float32))


METHOD = Method(
    name="oscar",
    variant=None,
    needs=frozenset({"rows", "weighted"}),
    estimators=Estimators(k=Estimator(id="qqt/1"), v=Estimator(id="sst/1")),
    composition=R_H_PBR,
    fit=fit,
)
