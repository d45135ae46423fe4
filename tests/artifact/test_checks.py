"""The limits of the numeric checks, from both sides, and that one bad head among good ones is
seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import tiny_artifacts as tiny
from numpy.typing import NDArray
from tiny_artifacts import rotation

from oscar_zoo.artifact import checks
from oscar_zoo.artifact.checks import CheckFinding, Problem
from oscar_zoo.artifact.formats import RotationSet

GOOD = tiny.rotation_set()
HEADS = tiny.per_head_set()
PARTNERED = tiny.partnered_set()


def off_by(error: float) -> RotationSet:
    """A Hadamard set (exact in float64) with `R R^T - I` off by `error` in one entry of the
    diagonal."""
    d = 64  # entries of 1/8 are exact
    good = tiny.hadamard_set(d=d)
    forward = good.layers[-1].forward.astype(np.float64)
    forward[3] *= np.sqrt(1 + error)
    return tiny.change(good, forward=forward.astype(np.float32))


def first_values(*changed: float) -> NDArray[np.float32]:
    values = GOOD.layers[-1].eigenvalues
    assert values is not None
    return np.concatenate(
        [np.array(changed, dtype=np.float32) * values[-1], values[len(changed) :]]
    )


@pytest.mark.parametrize(
    ("error", "grade"),
    [(1e-7, "fp64"), (4e-7, "fp32"), (4.5e-6, "fp32"), (5.5e-6, None), (-5.5e-6, None)],
)
def test_grades_of_precision(error: float, grade: str | None) -> None:
    result = checks.numeric(off_by(error))
    if grade is None:
        assert isinstance(result, Problem)
        assert (result.code, result.layer, result.limit) == ("not_orthogonal", 1, 5e-6)
        assert result.measured == pytest.approx(abs(error), rel=0.1)
    else:
        assert isinstance(result, tuple)
        assert result[1] == grade
        assert result[0].warnings == (() if grade == "fp64" else ("numeric.fp32_grade",))


@pytest.mark.parametrize(("noise", "grade"), [(0.0, "fp64"), (3e-7, "fp32")])
def test_partners_are_graded_by_what_rounding_alone_gives(noise: float, grade: str) -> None:
    """A pair of inverses with condition 200, exact in float64: stored in float32 it is off by more
    than a rotation."""
    draw = np.random.default_rng(0)
    left, right = (np.linalg.qr(draw.standard_normal((2, 64, 64)))[0] for _ in range(2))
    stretch = np.geomspace(1, 200, 64)
    forward, partner = (left * stretch) @ right, (left / stretch) @ right
    partner = partner * (1 + noise * draw.standard_normal(partner.shape))
    stored = {"forward": forward.astype(np.float32), "partner": partner.astype(np.float32)}
    layer = replace(PARTNERED.layers[0], **stored)
    found = checks.numeric(replace(PARTNERED, layers=(layer,)))
    assert isinstance(found, tuple)
    assert (
        np.abs(
            forward.astype(np.float32) @ partner.astype(np.float32).swapaxes(1, 2) - np.eye(64)
        ).max()
        > 2e-7
    )
    assert found[1] == grade


def test_the_worst_head_is_named() -> None:
    forward = HEADS.layers[-1].forward.copy()
    forward[1] *= np.float32(1.001)
    result = checks.numeric(tiny.change(HEADS, forward=forward))
    assert isinstance(result, Problem)
    assert (result.layer, result.head) == (1, 1)


def test_a_partner_is_part_of_what_makes_a_layer() -> None:
    broken = tiny.change(
        PARTNERED, forward=PARTNERED.layers[0].forward
    )  # the partner is still the last layer's
    assert isinstance(checks.numeric(broken), Problem)


@pytest.mark.parametrize(("ratio", "warned"), [(300.0, False), (3000.0, True)])
def test_an_ill_conditioned_transform_is_a_warning(ratio: float, warned: bool) -> None:
    scale = np.geomspace(1, ratio, tiny.D)
    basis = HEADS.layers[-1].forward.astype(np.float64)
    forward = basis * scale
    changed = tiny.change(
        PARTNERED, forward=forward.astype(np.float32), partner=(basis / scale).astype(np.float32)
    )
    exact = [
        replace(
            layer,
            partner=np.linalg.inv(layer.forward.astype(np.float64))
            .swapaxes(-1, -2)
            .astype(np.float32),
        )
        for layer in changed.layers
    ]
    result = checks.numeric(replace(changed, layers=tuple(exact)))
    assert not isinstance(result, Problem)
    assert ("numeric.condition" in result[0].warnings) is warned


@pytest.mark.parametrize(
    ("low", "allowed"), [(0.0, True), (-5e-7, True), (-2e-6, False), (-1.0, False)]
)
def test_eigenvalues_may_be_noise_below_zero(low: float, allowed: bool) -> None:
    result = checks.eigenvalues(tiny.change(GOOD, eigenvalues=first_values(low)))
    assert isinstance(result, CheckFinding) is allowed
    assert allowed or (isinstance(result, Problem) and result.code == "eigenvalues.sign")


def test_one_bad_head_is_enough() -> None:
    last = HEADS.layers[-1]
    assert last.eigenvalues is not None
    silent = last.eigenvalues.copy()
    silent[1] = 0
    found = checks.eigenvalues(tiny.change(HEADS, eigenvalues=silent))
    assert isinstance(found, Problem)
    assert found.code == "eigenvalues.sign"
    for code, matrix in {
        "content.identity": np.eye(tiny.D),
        "content.permutation": np.eye(tiny.D)[::-1],
        "content.hadamard": tiny.hadamard_set().layers[0].forward,
    }.items():
        forward = last.forward.copy()
        forward[1] = matrix
        found = checks.content(tiny.change(HEADS, forward=forward))
        assert isinstance(found, Problem)
        assert (found.code, found.layer) == (code, 1)


def test_layers_that_share_a_matrix_are_still_checked_for_their_own_eigenvalues() -> None:
    shared = tiny.hadamard_set()
    assert shared.layers[0].forward is shared.layers[1].forward
    found = checks.numeric(
        tiny.change(shared, eigenvalues=np.full(tiny.D, np.nan, dtype=np.float32))
    )
    assert isinstance(found, Problem)
    assert (found.code, found.layer) == ("not_finite", 1)


@pytest.mark.parametrize(
    ("k", "v", "warnings"),
    [
        (0.02, 0.1, ()),
        (0.02, 0.02, ("localisation.order",)),
        (0.1, 0.02, ("localisation.order",)),
        (3.0, 0.1, ("localisation.k", "localisation.order")),
        (0.02, 3.0, ("localisation.v",)),
    ],
)
def test_localisation_compares_keys_values_and_both(
    k: float, v: float, warnings: tuple[str, ...]
) -> None:
    sides = {"k": rotation("qqt_r_h_pbr", spread=k), "v": rotation("qqt_r_h_pbr", spread=v)}
    assert checks.localisation(sides).warnings == warnings


def test_results_come_in_order() -> None:
    assert list(checks.over_cores(lambda n: n * n, range(100))) == [n * n for n in range(100)]


def test_nothing_more_is_begun_once_the_caller_stops() -> None:
    begun = []
    results = checks.over_cores(begun.append, range(10_000))
    assert isinstance(results, Iterator)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(begun) < 10_000


def test_blas_has_one_thread_inside_and_its_own_number_after() -> None:
    blas = checks._openblas()
    if blas is None:
        pytest.skip("numpy has another BLAS here")
    threads, set_threads = blas
    before = threads()
    set_threads(2)
    try:
        assert set(checks.over_cores(lambda _: threads(), range(3))) == {1}
        outer = checks.over_cores(lambda _: 0, range(2))
        next(outer)
        assert list(checks.over_cores(lambda _: threads(), range(1))) == [1]
        assert threads() == 1
        outer.close()  # type: ignore[attr-defined]
        assert threads() == 2
    finally:
        set_threads(before)
