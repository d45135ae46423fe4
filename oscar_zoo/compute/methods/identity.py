"""`identity`: the cache as the model makes it.

It is a baseline to measure against; no artifact holds it.
"""

from __future__ import annotations

import numpy as np

from oscar_zoo.artifact.formats import LayerTransform, RotationSet
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.methods.base import FittedPair, Method
from oscar_zoo.compute.moments import Moments


def fit(moments: Moments) -> FittedPair:
    """R = I for keys and values of all layers; only the geometry of `moments` is read."""
    geometry = moments.geometry
    return FittedPair(_side(geometry, geometry.head_dim), _side(geometry, geometry.v_head_dim), {})


def _side(geometry: Geometry, width: int) -> RotationSet:
    matrix = np.eye(width, dtype=np.float32)
    return RotationSet(
        format_version=1,
        objective="identity",
        grouping="layer",
        transform="identity",
        orthogonal=True,
        centered=False,
        layers=tuple(LayerTransform(layer, matrix, matrix) for layer in geometry.attention_layers),
    )


METHOD = Method(
    name="identity",
    variant="identity",
    needs=frozenset(),
    estimators=None,
    composition=None,
    fit=fit,
)
