"""Mistakes of careful people with rotations: files that load and serve, and lose accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import tiny_rotations as tiny
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard, pbr_permutation

Matrix = NDArray[np.float64]
Change = Callable[[RotationSet], RotationSet]


def spectra(dynamic_range: float, seed: int, d: int = 64) -> Matrix:
    """Two covariances whose diagonal spans `dynamic_range`, a few channels far above the rest."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.uniform(0, 1, d))
    scale[:: d // 4] *= np.sqrt(dynamic_range)
    rows = (
        rng.standard_normal((2, 4 * d, d)) @ (np.eye(d) + 0.1 * rng.standard_normal((d, d))) * scale
    )
    return np.asarray(np.swapaxes(rows, -2, -1) @ rows / (4 * d))


def other_signs(rotations: RotationSet) -> RotationSet:
    """No mistake: the signs of eigenvectors are arbitrary."""

    def flip(matrix: NDArray[np.float32]) -> NDArray[np.floating]:
        order, d = _order(matrix), len(matrix)
        signs = np.random.default_rng(d).choice([-1.0, 1.0], d)
        vectors = matrix[:, order] @ hadamard(d) * signs
        return (vectors @ hadamard(d))[:, np.argsort(order)]

    return _by_layer(flip)(rotations)


def _by_layer(change: Callable[[NDArray[np.float32]], NDArray[np.floating]]) -> Change:
    def changed(layer: LayerTransform) -> LayerTransform:
        matrix = np.ascontiguousarray(change(layer.forward.copy()), np.float32)
        return replace(layer, forward=matrix, partner=matrix)

    return lambda rotations: replace(rotations, layers=tuple(map(changed, rotations.layers)))


def _order(matrix: NDArray[np.float32]) -> NDArray[np.int64]:
    """Where the columns of U H are in U H P."""
    return np.argsort(pbr_permutation(np.arange(len(matrix), dtype=np.float64)))


def _without_h(matrix: NDArray[np.float32]) -> NDArray[np.floating]:
    order = _order(matrix)
    return np.asarray((matrix[:, order] @ hadamard(len(matrix)))[:, np.argsort(order)])


def _swap_columns(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    matrix[:, [3, 7]] = matrix[:, [7, 3]]
    return matrix


def _negate_column(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    matrix[:, 5] *= -1
    return matrix


def _shift_layers(rotations: RotationSet) -> RotationSet:
    ids = [layer.layer_id for layer in rotations.layers]
    moved = zip(ids, rotations.layers[::-1], strict=True)
    return replace(rotations, layers=tuple(replace(layer, layer_id=i) for i, layer in moved))


def _scale_eigenvalues(rotations: RotationSet) -> RotationSet:
    doubled = ((layer, layer.eigenvalues) for layer in rotations.layers)
    return replace(
        rotations, layers=tuple(replace(a, eigenvalues=b * 2) for a, b in doubled if b is not None)
    )


def _made_from(objective: str, seed: int) -> Change:
    """The rotation of other covariances, called like the right one."""

    def other(rotations: RotationSet) -> RotationSet:
        made = tiny.rotation_set(objective, matrices=spectra(100, seed, rotations.head_dim))
        return replace(made, objective=rotations.objective)

    return other


MISTAKES: dict[str, Change] = {
    "transposed": _by_layer(lambda r: r.T),
    "random": _by_layer(
        lambda r: np.linalg.qr(np.random.default_rng(3).standard_normal(r.shape))[0]
    ),
    "plain Hadamard": _by_layer(lambda r: hadamard(len(r))),
    "layers shifted": _shift_layers,
    "values served as keys": _made_from("sst_r_h_pbr", 77),
    "another model": _made_from("qqt_r_h_pbr", 78),
    "without H": _by_layer(_without_h),
    "without P": _by_layer(lambda r: r[:, _order(r)]),
    "columns permuted": _by_layer(lambda r: r[:, np.random.default_rng(4).permutation(len(r))]),
    "columns swapped": _by_layer(_swap_columns),
    "column negated": _by_layer(_negate_column),
    "eigenvalues doubled": _scale_eigenvalues,
}
"""Twelve of them, each a function from the right rotation to a wrong one."""
