"""Hadamard matrix and permutation against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from oscar_zoo.artifact.hadamard import bit_reversal, hadamard, is_power_of_two, pbr_permutation
from oscar_zoo.errors import UsageError

SIZES = [1, 2, 4, 8, 64, 128, 256]


@pytest.mark.parametrize("d", SIZES)
def test_hadamard_by_its_formula(d: int) -> None:
    h = hadamard(d)
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(d)] for i in range(d)])
    assert np.allclose(h, signs / np.sqrt(d), atol=1e-15)
    assert np.allclose(h @ h.T, np.eye(d), atol=1e-14)
    assert not h.flags.writeable


@pytest.mark.parametrize("d", SIZES)
def test_bit_reversal_is_its_own_inverse(d: int) -> None:
    assert np.array_equal(bit_reversal(d)[bit_reversal(d)], np.arange(d))


def test_bit_reversal_of_eight() -> None:
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


@pytest.mark.parametrize("d", SIZES)
def test_ascending_eigenvalues_always_give_one_permutation(d: int) -> None:
    values = np.sort(np.random.default_rng(d).gamma(1.0, size=d))
    assert np.array_equal(pbr_permutation(values), d - 1 - bit_reversal(d))


def test_strong_columns_are_spread() -> None:
    values = np.array([5.0, 1.0, 9.0, 3.0])
    assert pbr_permutation(values).tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize("d", SIZES[1:])
def test_the_permutation_only_reorders_and_resigns_eigenvectors(d: int) -> None:
    p = np.eye(d)[:, d - 1 - bit_reversal(d)]
    signs = np.diag([(-1.0) ** bin(i).count("1") for i in range(d)])
    reordered = np.eye(d)[:, bit_reversal(d)] @ signs
    assert np.allclose(hadamard(d) @ p, reordered @ hadamard(d), atol=1e-12)


@pytest.mark.parametrize("d", [0, -1, 3, 6, 96, 192])
def test_other_sizes_are_refused(d: int) -> None:
    assert not is_power_of_two(d)
    with pytest.raises(UsageError):
        hadamard(d)
    with pytest.raises(UsageError):
        bit_reversal(d)
