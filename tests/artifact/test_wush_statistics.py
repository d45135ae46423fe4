"""WUSH files against their fingerprint: right ones pass with a wide margin, each mistake is far
above the limit."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import tiny_artifacts as artifacts
import tiny_artifacts as tiny
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard
from oscar_zoo.artifact.manifest import Composition, Estimator, Estimators, Manifest
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
GEOMETRY = artifacts.cache_shape(6, heads=6, kv_heads=2, dim=8, at=LAYERS)
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
            np.array(one, dtype=np.float32) for one in zip(*heads, strict=True)
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


def compared(rotations: RotationSet, *described: Any, **changes: Matrix) -> list[FingerprintMatch]:
    result = compare_wush(rotations, fingerprint(**changes), *described or (manifest(),))
    assert result is not None
    return result


def worst(*given: Any, **changes: Matrix) -> float:
    return max(one.worst for one in compared(*given, **changes))


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize(
    ("gamma", "damping"), [(0, "identity"), (1e-2, "identity"), (0.5, "diagonal")]
)
def test_right_files_pass_with_a_wide_margin(role: str, gamma: float, damping: str) -> None:
    given = wush_set(role, gamma, damping), manifest(gamma, damping)
    assert [one.matrix for one in compared(*given)] == [*WUSH_MATRICES[role]]  # type: ignore[index]
    assert worst(*given) < LIMIT / 20


@pytest.mark.parametrize("role", ["k", "v"])
def test_the_order_in_which_eigenvectors_met_h_is_the_recorded_one(role: str) -> None:
    for made, said in product(("descending", None), repeat=2):
        rotations = wush_set(role, descending=made == "descending")
        seen = worst(rotations, manifest(permutation=said))
        assert seen < LIMIT / 20 if said == made else seen > 100 * LIMIT


def transposed(layer: LayerTransform) -> LayerTransform:
    pair = layer.partner, layer.forward
    forward, partner = (np.ascontiguousarray(np.swapaxes(x, -2, -1)) for x in pair)
    return replace(layer, forward=forward, partner=partner)


def both(change: Callable[[Any], Any]) -> Callable[[LayerTransform], LayerTransform]:
    return lambda one: replace(one, forward=change(one.forward), partner=change(one.partner))


ROTATION = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))[0].astype(np.float32)
MISTAKES: dict[str, Callable[[Any], LayerTransform]] = {
    "swapped": lambda layer: replace(layer, forward=layer.partner, partner=layer.forward),
    "transposed": transposed,
    "scaled": lambda layer: replace(layer, eigenvalues=layer.eigenvalues * np.float32(1.1)),
    "other heads": lambda layer: replace(
        both(lambda x: x[::-1])(layer), eigenvalues=layer.eigenvalues[::-1]
    ),
    "columns exchanged": both(lambda x: x[..., [1, 0, *range(2, 8)]]),
    "rotated": both(lambda x: ROTATION @ x),  # still inverse to each other, and far away
}


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_far_above_the_limit(role: str, mistake: str) -> None:
    right = wush_set(role)
    wrong = replace(right, layers=(right.layers[0], MISTAKES[mistake](right.layers[1])))
    found = max(compared(wrong), key=lambda one: one.worst)
    assert found.worst > 1000 * LIMIT and found.layer == 4


def test_layers_of_another_place_or_model_are_seen() -> None:
    right = wush_set("k")
    places = zip(reversed(right.layers), LAYERS, strict=True)
    shifted = replace(right, layers=tuple(replace(layer, layer_id=i) for layer, i in places))
    other = tiny.covariances(2, 2, seed=50)
    assert min(worst(shifted), worst(right, kk=other), worst(right, qq=other)) > 1000 * LIMIT
    assert worst(right, vv=other) < LIMIT


def test_another_damping_than_the_recorded_one_is_seen() -> None:
    for wrong in (manifest(2e-2), manifest(damping="diagonal"), manifest(0)):
        assert worst(wush_set("k"), wrong) > 100 * LIMIT


def test_a_fingerprint_of_other_shapes_or_without_energy_never_passes() -> None:
    layers_only = {name: matrix.mean(1) for name, matrix in RECORDED.items()}
    none = {name: 0 * matrix for name, matrix in RECORDED.items()}
    negative = {"kk": -RECORDED["kk"], "vv": -RECORDED["vv"]}
    for role in "kv":
        for changes in (layers_only, none, negative):
            assert all(one.worst == np.inf for one in compared(wush_set(role), **changes))


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
