"""WUSH files against their fingerprint: right ones pass with a wide margin, each mistake is far
above the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tiny_artifacts as artifacts
import tiny_artifacts as tiny
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard
from oscar_zoo.artifact.manifest import Composition, Estimator, Estimators, Manifest
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.artifact.statistics import (
    LIMIT,
    WUSH_MATRICES,
    FingerprintMatch,
    compare_wush,
    fingerprint_bytes,
    read_fingerprint,
)

Matrix = NDArray[np.float64]
LAYERS = (1, 4)
GEOMETRY = Geometry(
    num_layers=6, num_q_heads=6, num_kv_heads=2, head_dim=8, v_head_dim=8, attention_layers=LAYERS
)
RECORDED = {
    name: tiny.covariances(2, 2, seed=seed) for seed, name in enumerate(("kk", "qq", "vv", "wo"), 1)
}
SCALES = {"k": 6.0, "v": 2.0}
"""Hs in units of the recorded matrix: 2 times the sum over three query heads, 2 times the sum that
is recorded."""


def damped(matrix: Matrix, gamma: float, damping: str) -> Matrix:
    added = (
        np.diag(np.diag(matrix))
        if damping == "diagonal"
        else np.trace(matrix) / len(matrix) * np.eye(len(matrix))
    )
    return np.asarray(matrix + gamma * added)


def head(
    gram: Matrix, hessian: Matrix, gamma: float, damping: str, descending: bool
) -> tuple[Matrix, Matrix, Matrix]:
    """T^T, T^-1 and lambda by the column formula of the paper and a plain inverse."""
    lower = np.linalg.cholesky(damped(hessian, gamma, damping))
    values, vectors = np.linalg.eigh(lower.T @ damped(gram, gamma, damping) @ lower)
    c = np.sqrt((1 + gamma) * np.trace(gram) / np.sqrt(values).sum())
    flat = hadamard(len(gram))[:, ::-1] if descending else hadamard(len(gram))
    transform = c * flat @ np.diag(values**-0.25) @ vectors.T @ lower.T
    return transform.T, np.linalg.inv(transform), values


def wush_set(
    role: str, gamma: float = 1e-2, damping: str = "identity", descending: bool = False
) -> RotationSet:
    gram, hessian = (RECORDED[name] for name in WUSH_MATRICES[role])  # type: ignore[index]
    layers = []
    for position, layer_id in enumerate(LAYERS):
        heads = [
            head(gram[position, h], SCALES[role] * hessian[position, h], gamma, damping, descending)
            for h in range(2)
        ]
        forward, partner, values = (
            np.array(part, dtype=np.float32) for part in zip(*heads, strict=True)
        )
        layers.append(LayerTransform(layer_id, forward, partner, eigenvalues=values))
    side = "k" if role == "k" else "v"
    return RotationSet(3, f"wush_{role}", "kv_head", "wush", False, False, tuple(layers), {}, side)  # type: ignore[arg-type]


def manifest(
    gamma: object = 1e-2,
    damping: object = "identity",
    estimator: str = "wush-{}/1",
    permutation: str | None = None,
) -> Manifest:
    plain = artifacts.manifest(artifacts.payload(), geometry=GEOMETRY)
    params = {"gamma": gamma, "damping": damping}
    k, v = (Estimator.model_construct(id=estimator.format(side), params=params) for side in "kv")
    composition = Composition(id="wush", hadamard="sylvester", permutation=permutation)
    update = {"estimator": Estimators.model_construct(k=k, v=v), "composition": composition}
    fit = plain.fit.model_copy(update=update)
    return plain.model_copy(update={"fit": fit})


def fingerprint(**changes: Matrix) -> dict[str, NDArray[np.float32]]:
    model = manifest().model
    return read_fingerprint(fingerprint_bytes(RECORDED | changes, LAYERS, model.id, model.revision))


def found(rotations: RotationSet, **changes: Matrix) -> list[FingerprintMatch]:
    result = compare_wush(rotations, fingerprint(**changes), manifest())
    assert result is not None
    return result


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize(
    ("gamma", "damping"), [(0, "identity"), (1e-2, "identity"), (0.5, "diagonal")]
)
def test_right_files_pass_with_a_wide_margin(role: str, gamma: float, damping: str) -> None:
    result = compare_wush(wush_set(role, gamma, damping), fingerprint(), manifest(gamma, damping))
    assert result is not None
    assert [one.matrix for one in result] == [*WUSH_MATRICES[role]]  # type: ignore[index]
    assert max(one.worst for one in result) < LIMIT / 20


@pytest.mark.parametrize("role", ["k", "v"])
def test_the_order_in_which_eigenvectors_met_h_is_the_recorded_one(role: str) -> None:
    files = {
        order: wush_set(role, descending=order == "descending") for order in ("descending", None)
    }
    for made, rotations in files.items():
        for said in files:
            result = compare_wush(rotations, fingerprint(), manifest(permutation=said))
            assert result is not None
            worst = max(one.worst for one in result)
            assert worst < LIMIT / 20 if said == made else worst > 100 * LIMIT


def swapped(layer: LayerTransform) -> LayerTransform:
    return replace(layer, forward=layer.partner, partner=layer.forward)


def transposed(layer: LayerTransform) -> LayerTransform:
    forward, partner = (
        np.ascontiguousarray(np.swapaxes(x, -2, -1)) for x in (layer.forward, layer.partner)
    )
    return replace(layer, forward=partner, partner=forward)


def scaled(layer: LayerTransform) -> LayerTransform:
    assert layer.eigenvalues is not None
    return replace(layer, eigenvalues=layer.eigenvalues * np.float32(1.1))


def other_heads(layer: LayerTransform) -> LayerTransform:
    assert layer.eigenvalues is not None
    return replace(
        layer,
        forward=layer.forward[::-1],
        partner=layer.partner[::-1],
        eigenvalues=layer.eigenvalues[::-1],
    )


def columns_exchanged(layer: LayerTransform) -> LayerTransform:
    order = [1, 0, *range(2, 8)]
    return replace(layer, forward=layer.forward[..., order], partner=layer.partner[..., order])


def rotated(layer: LayerTransform) -> LayerTransform:
    """Still inverse to each other, and far from what was measured."""
    q = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))[0].astype(np.float32)
    return replace(layer, forward=q @ layer.forward, partner=q @ layer.partner)


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize(
    "mistake", [swapped, transposed, scaled, other_heads, columns_exchanged, rotated]
)
def test_mistakes_are_far_above_the_limit(
    role: str, mistake: Callable[[LayerTransform], LayerTransform]
) -> None:
    right = wush_set(role)
    wrong = replace(right, layers=(right.layers[0], mistake(right.layers[1])))
    worst = max(found(wrong), key=lambda one: one.worst)
    assert worst.worst > 1000 * LIMIT
    assert worst.layer == 4


def test_layers_of_another_place_or_model_are_seen() -> None:
    right = wush_set("k")
    shifted = [
        replace(layer, layer_id=i) for layer, i in zip(reversed(right.layers), LAYERS, strict=True)
    ]
    other = tiny.covariances(2, 2, seed=50)
    seen = [found(replace(right, layers=tuple(shifted))), found(right, kk=other)]
    for result in (*seen, found(right, qq=other)):
        assert max(one.worst for one in result) > 1000 * LIMIT
    assert max(one.worst for one in found(right, vv=other)) < LIMIT


def test_another_damping_than_the_recorded_one_is_seen() -> None:
    for wrong in (manifest(2e-2), manifest(damping="diagonal"), manifest(0)):
        result = compare_wush(wush_set("k"), fingerprint(), wrong)
        assert result is not None
        assert max(one.worst for one in result) > 100 * LIMIT


def test_a_fingerprint_of_other_shapes_or_without_energy_never_passes() -> None:
    layers_only = {name: matrix.mean(1) for name, matrix in RECORDED.items()}
    none = {name: 0 * matrix for name, matrix in RECORDED.items()}
    negative = {"kk": -RECORDED["kk"], "vv": -RECORDED["vv"]}
    for role in "kv":
        for changes in (layers_only, none, negative):
            assert all(one.worst == np.inf for one in found(wush_set(role), **changes))


def test_what_cannot_be_compared_is_not() -> None:
    right = wush_set("k")
    missing = {name: value for name, value in fingerprint().items() if not name.startswith("qq")}
    bare = replace(right, layers=tuple(replace(layer, eigenvalues=None) for layer in right.layers))
    for rotations, stored, described in (
        (tiny.rotation_set(), fingerprint(), manifest()),
        (tiny.partnered_set("k"), fingerprint(), manifest()),
        (bare, fingerprint(), manifest()),
        (right, missing, manifest()),
        (right, fingerprint(), manifest(gamma="much")),
        (right, fingerprint(), manifest(gamma=True)),
        (right, fingerprint(), manifest(gamma=-1)),
        (right, fingerprint(), manifest(damping="none")),
        (right, fingerprint(), manifest(estimator="qqt/1")),
        (right, fingerprint(), artifacts.manifest(artifacts.payload(), geometry=GEOMETRY)),
    ):
        assert compare_wush(rotations, stored, described) is None
