"""`hadamard`: the same Hadamard matrix in every layer, without data. The baseline of every comparison."""

from __future__ import annotations

import numpy as np

from oscar_zoo.artifact.formats import LayerTransform, RotationSet
from oscar_zoo.artifact.manifest import Composition
from oscar_zoo.artifact.transforms import hadamard
from oscar_zoo.compute.methods.base import FittedPair, Method
from oscar_zoo.compute.moments import Moments


def fit(moments: Moments) -> FittedPair:
    """R = H for keys and values of all layers, eigenvalues all 1; only the geometry of `moments` is read."""
    shape = moments.geometry
    return FittedPair(
        _side(shape.attention_layers, shape.head_dim), _side(shape.attention_layers, shape.v_head_dim), {}
    )


def _side(layer_ids: tuple[int, ...], head_dim: int) -> RotationSet:
    matrix, ones = hadamard(head_dim).astype(np.float32), np.ones(head_dim, dtype=np.float32)
    return RotationSet(
        format_version=1,
        objective="hadamard",
        grouping="layer",
        transform="hadamard",
        orthogonal=True,
        centered=False,
        # one array for all layers, as files of this kind have one record
        layers=tuple(LayerTransform(layer, matrix, matrix, eigenvalues=ones) for layer in layer_ids),
    )


METHOD = Method(
    name="hadamard",
    variant="hadamard",
    needs="nothing",
    estimators=None,
    composition=Composition(id="hadamard", hadamard="sylvester"),
    fit=fit,
)
