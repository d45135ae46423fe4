"""From a covariance to a rotation: R = U H P.

U makes the error weight diagonal; H makes it flat, every diagonal entry of (U H)^T C (U H) is tr(C)/d; P puts strong
and weak columns in turn, which matters only when a row has several quantization groups. All in float64.

Source: composition `r_h_pbr` of OSCAR (arXiv 2605.17757).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.manifest import Composition
from oscar_zoo.artifact.transforms import hadamard, pbr_permutation

Matrix = NDArray[np.float64]

R_H_PBR = Composition(id="r_h_pbr", hadamard="sylvester", permutation="bit-reversal", signs="max-abs-positive")


def eigenbasis(covariance: Matrix) -> tuple[Matrix, Matrix]:
    """Eigenvalues in ascending order and eigenvectors in columns, with a fixed choice of sign.

    Each eigenvector's entry of largest magnitude is positive (the first of equals), so that a refit repeats.

    Args:
        covariance: `[d, d]` float64, symmetric.

    Returns:
        `[d]` and `[d, d]`, float64.
    """
    values, vectors = np.linalg.eigh(covariance)
    largest = np.abs(vectors).argmax(axis=0)
    signs = np.where(vectors[largest, np.arange(vectors.shape[1])] < 0, -1.0, 1.0)
    return values, vectors * signs


def r_h_pbr(covariance: Matrix) -> tuple[Matrix, Matrix]:
    """The rotation U H P of a symmetric `[d, d]` float64 matrix and its ascending eigenvalues `[d]`.

    Raises:
        UsageError: `d` is not a power of two.
    """
    values, vectors = eigenbasis(covariance)
    return (vectors @ hadamard(len(values)))[:, pbr_permutation(values)], values
