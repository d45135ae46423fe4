"""`hadamard`: the same Hadamard matrix in every layer, fitted without data.

Every comparison uses it as the baseline.
"""

from __future__ import annotations

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.manifest import Composition
from oscar_zoo.compute.methods.base import FittedPair, Method
from oscar_zoo.compute.moments import Moments


def fit(moments: Moments) -> FittedPair:
    """Use the Hadamard matrix for keys and values; reads only the geometry of `moments`."""
    geometry = moments.geometry
    return FittedPair(hadamard_set(geometry, "k"), hadamard_set(geometry, "v"), {})


METHOD = Method(
    name="hadamard",
    variant="hadamard",
    needs=frozenset(),
    estimators=None,
    composition=Composition(id="hadamard", hadamard="sylvester"),
    fit=fit,
)
