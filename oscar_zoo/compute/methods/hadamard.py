"""`hadamard`: the same Hadamard matrix in every layer, without data. The baseline of every
comparison."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.manifest import Composition
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.methods.base import FittedPair, Method
from oscar_zoo.compute.moments import Moments
from oscar_zoo.evaluate.simulated_cache import hadamard_set


def fit(moments: Moments) -> FittedPair:
    """R = H for keys and values of all layers, eigenvalues all 1; only the geometry of `moments` is
    read."""
    return FittedPair(_side(moments.geometry, "k"), _side(moments.geometry, "v"), {})


def _side(geometry: Geometry, role: Role) -> RotationSet:
    plain = hadamard_set(geometry, role)
    ones = np.ones(plain.head_dim, dtype=np.float32)
    return replace(plain, layers=tuple(replace(layer, eigenvalues=ones) for layer in plain.layers))


METHOD = Method(
    name="hadamard",
    variant="hadamard",
    needs=frozenset(),
    estimators=None,
    composition=Composition(id="hadamard", hadamard="sylvester"),
    fit=fit,
)
