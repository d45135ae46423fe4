"""Small rotation sets made like real ones: d = 8, two layers, from random covariances with a fixed
seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard, pbr_permutation

D = 8
LAYERS = (0, 1)
HEADS = 2


def covariances(*shape: int, d: int = D, seed: int = 1, spread: float = 3.0) -> NDArray[np.float64]:
    """`[*shape, d, d]` float64 second moments of correlated channels of unequal size."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((*shape, 4 * d, d)) * np.exp(rng.uniform(0, spread, (*shape, 1, d)))
    rows = rows @ np.linalg.qr(rng.standard_normal((*shape, d, d)))[0]
    return np.asarray(np.swapaxes(rows, -2, -1) @ rows / (4 * d))


def rotated(covariance: NDArray[np.float64], layer_id: int) -> LayerTransform:
    """The layer U H P of `[d, d]` or `[heads, d, d]`."""
    values, vectors = np.linalg.eigh(covariance)
    d = values.shape[-1]
    matrix = (vectors @ hadamard(d))[..., pbr_permutation(np.arange(d, dtype=np.float64))].astype(
        np.float32
    )
    return LayerTransform(layer_id, matrix, matrix, eigenvalues=values.astype(np.float32))


def rotation_set(
    objective: str = "qqt_r_h_pbr",
    *,
    matrices: NDArray[np.float64] | None = None,
    layers: Sequence[int] = LAYERS,
) -> RotationSet:
    """Format 1, one matrix per layer."""
    stack = (
        covariances(len(layers), seed=len(objective) + ord(objective[0]))
        if matrices is None
        else matrices
    )
    found = tuple(rotated(matrix, layer) for layer, matrix in zip(layers, stack, strict=True))
    return RotationSet(1, objective, "layer", "oscar", True, False, found)


def per_head_set(objective: str = "qqt_r_h_pbr") -> RotationSet:
    """Format 2, one matrix per layer and KV head."""
    found = tuple(
        rotated(matrix, layer) for layer, matrix in zip(LAYERS, covariances(2, HEADS), strict=True)
    )
    return RotationSet(2, objective, "kv_head", "oscar", True, False, found)


def hadamard_set(layers: Sequence[int] = LAYERS, d: int = D) -> RotationSet:
    """Format 1, the Hadamard matrix in every layer."""
    matrix, ones = hadamard(d).astype(np.float32), np.ones(d, dtype=np.float32)
    found = tuple(LayerTransform(layer, matrix, matrix, eigenvalues=ones) for layer in layers)
    return RotationSet(1, "hadamard", "layer", "hadamard", True, False, found)


def partnered_set(side: str = "k") -> RotationSet:
    """Format 3, not orthogonal, keys also centered, one matrix per layer and KV head."""
    rng = np.random.default_rng(5)
    found = []
    for layer in LAYERS:
        forward = per_head_set().layers[layer].forward.astype(np.float64) * np.exp(
            rng.uniform(-1, 1, (HEADS, 1, D))
        )
        forward = forward.astype(np.float32)
        partner = np.swapaxes(np.linalg.inv(forward.astype(np.float64)), -2, -1).astype(np.float32)
        mean = rng.standard_normal((HEADS, D)).astype(np.float32) if side == "k" else None
        eigenvalues = np.sort(rng.uniform(1, 9, (HEADS, D)), axis=-1).astype(np.float32)
        found.append(LayerTransform(layer, forward, partner, mean, eigenvalues))
    role = "k" if side == "k" else "v"
    return RotationSet(
        3, f"wush_{side}", "kv_head", "wush", False, side == "k", tuple(found), {}, role
    )


def change(rotations: RotationSet, **arrays: NDArray[np.float32]) -> RotationSet:
    """`rotations` with other arrays in its last layer; an orthogonal set keeps its partner equal to
    forward."""
    last = replace(rotations.layers[-1], **arrays)
    if rotations.orthogonal:
        last = replace(last, partner=last.forward)
    return replace(rotations, layers=(*rotations.layers[:-1], last))


def assert_same(one: RotationSet, other: RotationSet) -> None:
    """Equal in every field, arrays bit for bit."""
    for name in (
        "format_version",
        "objective",
        "grouping",
        "transform",
        "orthogonal",
        "centered",
        "declared_role",
    ):
        assert getattr(one, name) == getattr(other, name)
    assert dict(one.calibration) == dict(other.calibration)
    assert one.layer_ids == other.layer_ids
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for name in ("forward", "partner", "mean", "eigenvalues"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            assert a is None or (
                a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
            )
