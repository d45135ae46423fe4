"""Hadamard matrix and permutation against their definitions."""

import numpy as np
import pytest

from oscar_zoo.artifact.formats import bit_reversal, hadamard, has_hadamard, pbr_permutation
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
def test_ascending_eigenvalues_always_give_one_permutation(d: int) -> None:
    values = np.sort(np.random.default_rng(d).gamma(1.0, size=d))
    assert np.array_equal(pbr_permutation(values), d - 1 - bit_reversal(d))


@pytest.mark.parametrize("d", SIZES[1:])
def test_the_permutation_only_reorders_and_resigns_eigenvectors(d: int) -> None:
    p = np.eye(d)[:, d - 1 - bit_reversal(d)]
    signs = np.diag([(-1.0) ** bin(i).count("1") for i in range(d)])
    reordered = np.eye(d)[:, bit_reversal(d)] @ signs
    assert np.allclose(hadamard(d) @ p, reordered @ hadamard(d), atol=1e-12)


@pytest.mark.parametrize("d", [24, 40, 56, 72, 80, 96, 104, 112, 120, 160, 192, 200, 320, 384])
def test_widths_that_are_no_power_of_two_have_a_matrix_with_the_same_properties(d: int) -> None:
    """Symmetric, orthogonal, and flat: every entry has one size, and the first row one sign."""
    h = hadamard(d)
    assert np.allclose(h @ h, np.eye(d), atol=1e-14)
    assert np.array_equal(h, h.T)
    assert np.allclose(np.abs(h), d**-0.5, atol=1e-15)
    assert np.all(h[0] == h[0, 0]) and h[0, 0] > 0
    assert not h.flags.writeable


@pytest.mark.parametrize(("d", "groups"), [(96, 2), (96, 4), (80, 4), (192, 2), (192, 4)])
def test_strong_columns_are_spread_over_the_groups_of_such_a_row(d: int, groups: int) -> None:
    permutation = pbr_permutation(np.arange(d, 0, -1.0))
    assert sorted(permutation) == list(range(d))
    for channels in np.split(permutation, groups):
        assert sorted(channels // groups) == list(range(d // groups))


@pytest.mark.parametrize("d", [0, -1, 3, 6, 12, 88, 100, 136])
def test_other_sizes_are_refused(d: int) -> None:
    assert not has_hadamard(d)
    with pytest.raises(UsageError):
        hadamard(d)
    with pytest.raises(UsageError):
        bit_reversal(d)
