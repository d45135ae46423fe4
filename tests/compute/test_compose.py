"""The rotation U H P: orthogonal, flattening, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from oscar_zoo.compute.methods.compose import eigenbasis, r_h_pbr
from oscar_zoo.errors import UsageError


def covariance(d: int, seed: int, spread: float = 2.0) -> NDArray[np.float64]:
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(4 * d, d)) * np.exp(spread * draw.normal(size=d))
    mixed = rows @ np.linalg.qr(draw.normal(size=(d, d)))[0]
    return np.asarray(mixed.T @ mixed / len(rows))


@settings(deadline=None, max_examples=20)
@given(d=st.sampled_from([2, 8, 64, 128]), seed=st.integers(0, 1000), spread=st.floats(0, 3))
def test_rotation_flattens_the_error_weight(d: int, seed: int, spread: float) -> None:
    c = covariance(d, seed, spread)
    rotation, values = (tensor.numpy() for tensor in r_h_pbr(torch.from_numpy(c)))
    assert np.abs(rotation @ rotation.T - np.eye(d)).max() < 1e-12
    flat = np.diag(rotation.T @ c @ rotation)
    assert np.abs(flat - np.trace(c) / d).max() <= 1e-12 * np.trace(c)
    assert np.all(np.diff(values) >= 0)
    assert values.sum() == pytest.approx(np.trace(c), rel=1e-12)


@settings(deadline=None, max_examples=20)
@given(d=st.sampled_from([4, 32]), seed=st.integers(0, 1000))
def test_the_largest_entry_of_every_eigenvector_is_positive(d: int, seed: int) -> None:
    _, vectors = eigenbasis(torch.from_numpy(covariance(d, seed)))
    assert bool((vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) > 0).all())


def test_many_matrices_at_once_are_those_of_each() -> None:
    stack = torch.from_numpy(np.array([covariance(16, seed) for seed in range(3)]))
    for together, one in zip(
        zip(*r_h_pbr(stack), strict=True), (r_h_pbr(matrix) for matrix in stack), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(together, one, strict=True))


def test_signs_do_not_depend_on_what_the_solver_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    c = torch.from_numpy(covariance(16, 5))
    want, _ = r_h_pbr(c)
    solve = torch.linalg.eigh
    flips = torch.from_numpy(np.resize([1.0, -1.0, -1.0], 16))
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda matrix: (solve(matrix)[0], solve(matrix)[1] * flips)
    )
    assert torch.equal(r_h_pbr(c)[0], want)


def test_columns_alternate_between_strong_and_weak() -> None:
    """With a diagonal covariance R is H P up to order: undoing H shows the bit-reversed
    eigenvectors."""
    values = np.array([1.0, 2.0, 3.0, 4.0])
    rotation, got = (tensor.numpy() for tensor in r_h_pbr(torch.from_numpy(np.diag(values))))
    assert np.array_equal(got, values)
    hadamard = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert np.allclose(rotation, hadamard[:, [3, 1, 2, 0]])  # perm[j] = d - 1 - br(j)


def test_a_width_without_hadamard_matrix_is_refused() -> None:
    with pytest.raises(UsageError, match="no Hadamard matrix"):
        r_h_pbr(torch.eye(12, dtype=torch.float64))
