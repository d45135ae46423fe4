"""The limits of the numeric checks, from both sides, and that one bad head among good ones is
seen."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import tiny_artifacts as tiny
from numpy.typing import NDArray
from tiny_artifacts import rotation

from oscar_zoo.artifact import checks
from oscar_zoo.artifact.checks import Finding
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.outcome import Refused, Rejected

Matrix = NDArray[np.floating]
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


def first_values(*given: float) -> NDArray[np.float32]:
    values = GOOD.layers[-1].eigenvalues
    assert values is not None
    return np.concatenate([np.array(given, dtype=np.float32) * values[-1], values[len(given) :]])


def refused(check: Callable[[RotationSet], object], rotations: RotationSet) -> Rejected:
    with pytest.raises(Refused) as caught:
        check(rotations)
    assert isinstance(caught.value.failure, Rejected)
    return caught.value.failure


@pytest.mark.parametrize(("error", "grade"), [(1e-7, "fp64"), (4e-7, "fp32"), (4.5e-6, "fp32")])
def test_grades_of_precision(error: float, grade: str) -> None:
    found, seen = checks.numeric(off_by(error))
    warned = found.warnings == ("numeric.fp32_grade",)
    assert seen == grade and warned is (grade == "fp32")


@pytest.mark.parametrize("error", [5.5e-6, -5.5e-6])
def test_what_is_less_precise_than_float32_is_refused(error: float) -> None:
    found = refused(checks.numeric, off_by(error))
    assert (found.code, found.layer, found.limit) == ("not_orthogonal", 1, 5e-6)
    assert found.measured == pytest.approx(abs(error), rel=0.1)


def stored(layer_set: RotationSet, forward: Matrix, partner: Matrix) -> RotationSet:
    """A set of one layer with a pair of matrices, as float32."""
    single = {"forward": forward.astype(np.float32), "partner": partner.astype(np.float32)}
    return replace(layer_set, layers=(replace(layer_set.layers[0], **single),))


@pytest.mark.parametrize(("noise", "grade"), [(0.0, "fp64"), (3e-7, "fp32")])
def test_partners_are_graded_by_what_rounding_alone_gives(noise: float, grade: str) -> None:
    """A pair of inverses with condition 200, exact in float64: stored in float32 it is off by more
    than a rotation."""
    draw = np.random.default_rng(0)
    left, right = (np.linalg.qr(draw.standard_normal((2, 64, 64)))[0] for _ in range(2))
    stretch = np.geomspace(1, 200, 64)
    forward, partner = (left * stretch) @ right, (left / stretch) @ right
    partner = partner * (1 + noise * draw.standard_normal(partner.shape))
    pair = stored(PARTNERED, forward, partner)
    product = pair.layers[0].forward @ pair.layers[0].partner.swapaxes(1, 2)
    assert np.abs(product - np.eye(64)).max() > 2e-7
    assert checks.numeric(pair)[1] == grade


@pytest.mark.parametrize(("ratio", "warned"), [(300.0, False), (3000.0, True)])
def test_an_ill_conditioned_transform_is_a_warning(ratio: float, warned: bool) -> None:
    forward = HEADS.layers[-1].forward * np.geomspace(1, ratio, tiny.D, dtype=np.float32)
    partner = np.linalg.inv(forward.astype(np.float64)).swapaxes(-1, -2)
    found, _ = checks.numeric(stored(PARTNERED, forward, partner))
    assert ("numeric.condition" in found.warnings) is warned


def test_one_bad_head_or_partner_is_enough() -> None:
    last = HEADS.layers[-1]
    assert last.eigenvalues is not None
    forward, silent = last.forward.copy(), last.eigenvalues.copy()
    forward[1] *= np.float32(1.001)
    silent[1] = 0
    found = refused(checks.numeric, tiny.change(HEADS, forward=forward))
    assert (found.layer, found.head) == (1, 1)
    refused(checks.numeric, tiny.change(PARTNERED, forward=PARTNERED.layers[0].forward))
    found = refused(checks.eigenvalues, tiny.change(HEADS, eigenvalues=silent))
    assert found.code == "eigenvalues.sign"
    for code, matrix in {
        "content.identity": np.eye(tiny.D),
        "content.permutation": np.eye(tiny.D)[::-1],
        "content.hadamard": tiny.hadamard_set().layers[0].forward,
    }.items():
        forward = last.forward.copy()
        forward[1] = matrix
        found = refused(checks.content, tiny.change(HEADS, forward=forward))
        assert (found.code, found.layer) == (code, 1)


@pytest.mark.parametrize(
    ("low", "allowed"), [(0.0, True), (-5e-7, True), (-2e-6, False), (-1.0, False)]
)
def test_eigenvalues_may_be_noise_below_zero(low: float, allowed: bool) -> None:
    changed = tiny.change(GOOD, eigenvalues=first_values(low))
    if allowed:
        assert isinstance(checks.eigenvalues(changed), Finding)
    else:
        assert refused(checks.eigenvalues, changed).code == "eigenvalues.sign"


def test_layers_that_share_a_matrix_are_still_checked_for_their_own_eigenvalues() -> None:
    shared = tiny.hadamard_set()
    assert shared.layers[0].forward is shared.layers[1].forward
    broken = tiny.change(shared, eigenvalues=np.full(tiny.D, np.nan, dtype=np.float32))
    found = refused(checks.numeric, broken)
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
def test_localisation_of_keys_values_or_both(k: float, v: float, warnings: tuple[str, ...]) -> None:
    sides = {"k": rotation("qqt_r_h_pbr", spread=k), "v": rotation("qqt_r_h_pbr", spread=v)}
    assert checks.localisation(sides).warnings == warnings


def test_results_come_in_order_until_the_caller_stops() -> None:
    assert list(checks.over_cores(lambda n: n * n, range(100))) == [n * n for n in range(100)]
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


@pytest.mark.parametrize(("weight", "code"), [(2e3, "feedback.range"), (np.nan, "not_finite")])
def test_weights_of_feedback_that_no_model_has_are_refused(weight: float, code: str) -> None:
    good = tiny.fed_back_set()
    checks.numeric(good)
    feedback = np.array(good.layers[-1].feedback)
    feedback[0, 3] = weight
    assert refused(checks.numeric, tiny.change(good, feedback=feedback)).code == code
