"""From a covariance to a rotation: R = U H P.

U makes the error weight diagonal. H makes it flat: every diagonal entry of (U H)^T C (U H) is
tr(C)/d. P alternates strong and weak columns, which matters only when a row has several
quantization groups. Everything is float64.

Source: composition `r_h_pbr` of OSCAR (arXiv 2605.17757).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oscar_zoo.artifact.formats import hadamard, pbr_permutation
from oscar_zoo.artifact.manifest import Composition

R_H_PBR = Composition(
    id="r_h_pbr", hadamard="sylvester", permutation="bit-reversal", signs="max-abs-positive"
)


def eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order and eigenvectors in columns, with a fixed choice of sign.

    Each eigenvector's entry of largest magnitude is positive (the first of equals), so that a refit
    repeats.

    Args:
        matrix: `[..., d, d]` float64, symmetric.

    Returns:
        `[..., d]` and `[..., d, d]`, float64.
    """
    values, vectors = torch.linalg.eigh(matrix)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return values, torch.where(largest < 0, -vectors, vectors)


def hadamard_matrix(d: int, device: torch.device) -> Tensor:
    """`artifact.hadamard.hadamard` as a new `[d, d]` float64 tensor on `device`."""
    return torch.tensor(hadamard(d), device=device)


def r_h_pbr(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The rotations U H P of symmetric matrices, and their ascending eigenvalues.

    `[..., d, d]` float64 in; `[..., d, d]` and `[..., d]` out.
    """
    d = covariance.shape[-1]
    flat = hadamard_matrix(d, covariance.device)
    values, vectors = eigenbasis(covariance)
    order = pbr_permutation(np.arange(d))  # eigenvalues ascend, so P is always the same
    return (vectors @ flat)[..., torch.tensor(order, device=covariance.device)], values
