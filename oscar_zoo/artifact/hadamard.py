"""The Hadamard matrix, the bit-reversal permutation, and the rotation set made of the matrix.

Checks and fits both use these definitions.

Source: composition `R = U H P` of OSCAR (paper section on rotation composition; code default
`r_h_pbr`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, Role, RotationSet
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import UsageError


def is_power_of_two(d: int) -> bool:
    """Whether `d` is 1, 2, 4, 8, ..."""
    return d > 0 and d & (d - 1) == 0


def _require_power_of_two(d: int) -> None:
    if not is_power_of_two(d):
        raise UsageError(
            f"head_dim {d} is not a power of two; no Hadamard transform is defined for it."
        )


@lru_cache(maxsize=16)
def hadamard(d: int) -> NDArray[np.float64]:
    """Sylvester's Hadamard matrix divided by sqrt(d), symmetric and orthogonal.

    Returns:
        `[d, d]` float64, read-only because it is cached.

    Raises:
        UsageError: `d` is not a power of two.
    """
    _require_power_of_two(d)
    h: NDArray[np.float64] = np.ones((1, 1), dtype=np.float64)
    while h.shape[0] < d:
        h = np.block([[h, h], [h, -h]])
    h = np.asarray(h / np.sqrt(d), dtype=np.float64)
    h.setflags(write=False)
    return h


def bit_reversal(d: int) -> NDArray[np.int64]:
    """`br[i]`: `i` with its log2(d) bits in reverse order; `[d]` int64.

    Raises:
        UsageError: `d` is not a power of two.
    """
    _require_power_of_two(d)
    bits = d.bit_length() - 1
    return np.array(
        [int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(d)], dtype=np.int64
    )


def pbr_permutation(eigenvalues: NDArray[np.floating]) -> NDArray[np.int64]:
    """The column order of P: `perm[br(i)] = s[i]`, and `P = I[:, perm]`.

    `s` are the indices by descending eigenvalue.

    `X @ P` is `X[:, perm]`. For ascending eigenvalues this is always `perm[j] = d - 1 - br(j)`.

    Args:
        eigenvalues: `[d]`, any order, d a power of two.
    """
    order = np.argsort(-np.asarray(eigenvalues, dtype=np.float64), kind="stable")
    perm = np.empty_like(order)
    perm[bit_reversal(len(order))] = order
    return perm


def hadamard_set(geometry: Geometry, role: Role) -> RotationSet:
    """The data-free baseline: the Hadamard matrix in every attention layer.

    Its eigenvalues are all 1, because no covariance stands behind the matrix.

    Raises:
        UsageError: the head size is not a power of two.
    """
    d = geometry.head_dim if role == "k" else geometry.v_head_dim
    matrix, ones = hadamard(d).astype(np.float32), np.ones(d, dtype=np.float32)
    return RotationSet(
        format_version=1,
        objective="hadamard",
        grouping="layer",
        transform="hadamard",
        orthogonal=True,
        centered=False,
        layers=tuple(
            LayerTransform(i, matrix, matrix, eigenvalues=ones) for i in geometry.attention_layers
        ),
    )
