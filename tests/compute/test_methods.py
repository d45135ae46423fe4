"""Every method against its formulas on the same rows, and as an artifact that passes its own
verification."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_moments import GROUP, MODEL, NUMERICS, LayerRows, describe, layer_rows, random_moments

from oscar_zoo.artifact.formats import hadamard
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.fit import FitResult, fit, fit_all, possible_methods
from oscar_zoo.compute.methods.base import FittedPair
from oscar_zoo.compute.methods.compose import r_h_pbr
from oscar_zoo.compute.methods.orthogonal import fit_per_head, fit_shared
from oscar_zoo.compute.methods.table import METHODS, TABLE, TUNED, find_method
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import moments_bytes, parse_moments
from oscar_zoo.errors import ComputeFailed, UsageError

Matrix = NDArray[np.float64]
PUBLISHED = [name for name in METHODS if TABLE[name].publishable]
UNWEIGHTED = tuple(name for name in METHODS if "weighted" not in METHODS[name].needs)
WITHOUT_DATA = tuple(name for name in METHODS if not METHODS[name].needs)
FITTED = [name for name in PUBLISHED if METHODS[name].needs]


def facts(moments: Moments, result: FitResult) -> Facts:
    return Facts(
        artifact_id=ArtifactId("random", "seq200_prompt1_group8"),
        model=MODEL,
        recipe=ServingRecipe(group_size=8, clip=Clip(k=0.96, v=0.92)),
        calibration=describe(moments).calibration if result.method.needs else None,
        numerics=NUMERICS if result.method.needs else None,
        created="2026-01-02T03:04:05Z",
    )


def queries(rows: LayerRows, head: int) -> Matrix:
    """A_h: the mean of q^T q over the tokens and the query heads of a group."""
    found = [rows.query[j].T @ rows.query[j] for j in range(head * GROUP, (head + 1) * GROUP)]
    return np.asarray(np.sum(found, axis=0) / (GROUP * rows.key.shape[1]))


def weighted_values(rows: LayerRows, head: int) -> Matrix:
    weights = np.einsum("ti,ij,tj->t", rows.key[head], queries(rows, head), rows.key[head])
    return np.asarray((rows.value[head].T * weights) @ rows.value[head] / weights.sum())


def outputs(rows: LayerRows, head: int) -> Matrix:
    found = [rows.output[j].T @ rows.output[j] for j in range(head * GROUP, (head + 1) * GROUP)]
    return np.asarray(np.sum(found, axis=0) / (GROUP * rows.key.shape[1]))


def rotation_of(covariance: Matrix) -> tuple[Matrix, Matrix]:
    """U H P with the descending eigenvalues put at bit-reversed places, entry by entry."""
    values, vectors = np.linalg.eigh(covariance)
    d = len(values)
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(d)])
    permutation = np.zeros((d, d))
    for i, strong in enumerate(np.argsort(-values)):
        reversed_bits = int(format(i, f"0{d.bit_length() - 1}b")[::-1], 2)
        permutation[strong, reversed_bits] = 1
    return vectors @ hadamard(d) @ permutation, values


TARGETS = {
    "oscar": (queries, weighted_values),
    "oscar-exact": (queries, outputs),
    "oscar-per-head": (queries, weighted_values),
}


@pytest.mark.parametrize("name", TARGETS)
def test_rotations_are_those_of_the_formulas(name: str) -> None:
    result = fit(random_moments(), METHODS[name])
    for side, formula in zip((result.k, result.v), TARGETS[name], strict=True):
        for layer in side.layers:
            per_head = np.array([formula(layer_rows(layer.layer_id), head) for head in range(2)])
            covariances = per_head if name == "oscar-per-head" else per_head.mean(0, keepdims=True)
            for head, covariance in enumerate(covariances):
                want, values = rotation_of(covariance)
                exact = r_h_pbr(torch.from_numpy(covariance))[0].numpy()
                assert np.abs(exact - want).max() <= 1e-9
                stored = layer.forward[head] if name == "oscar-per-head" else layer.forward
                eigenvalues = layer.eigenvalues if layer.eigenvalues is not None else np.zeros(0)
                assert np.abs(stored - want).max() <= 1e-7
                assert eigenvalues.reshape(-1, len(values))[head] == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("name", ["oscar", "oscar-exact", "oscar-per-head", "wush"])
def test_recorded_targets_are_those_of_the_formulas(name: str) -> None:
    targets = fit(random_moments(), METHODS[name]).targets
    assert [*targets] == {
        "oscar": ["qq", "sst"],
        "oscar-exact": ["qq", "oo"],
        "oscar-per-head": ["qq", "sst"],
        "wush": ["qq", "kk", "vv", "wo"],
    }[name]
    formulas = {"qq": queries, "sst": weighted_values, "oo": outputs}
    for matrix, formula in formulas.items():
        if matrix not in targets:
            continue
        for position, layer in enumerate(MODEL.attention_layers):
            want = np.array([formula(layer_rows(layer), head) for head in range(2)])
            got = targets[matrix][position]  # type: ignore[index]
            want = want if got.ndim == 3 else want.mean(0)
            assert np.abs(got - want).max() <= 1e-9 * np.abs(want).max()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_method_makes_an_artifact_that_verifies(name: str) -> None:
    moments = random_moments()
    result = fit(moments, METHODS[name])
    files = assemble(result, facts(moments, result))
    outcome = verify_files(files, strict=True)
    assert isinstance(outcome, Verified), outcome
    assert outcome.grade == "fp64" or name == "wush"
    manifest = Manifest.from_bytes(files[FILE_NAME])
    expected = {
        "hadamard": (1, "layer", (), "hadamard"),
        "oscar": (1, "layer", (), "qqt_r_h_pbr"),
        "oscar-exact": (1, "layer", (), "qqt_r_h_pbr"),
        "oscar-per-head": (2, "kv_head", ("per_head",), "perhead"),
        "wush": (3, "kv_head", ("per_head", "k_partner", "v_partner"), "wush"),
    }[name]
    assert (manifest.format_version, manifest.grouping, manifest.recipe.requires) == expected[:3]
    assert f"k_rotation_{expected[3]}.pt" in files
    assert manifest.fit.method == name
    assert (manifest.statistics is None) == (name in WITHOUT_DATA)
    if name.startswith("oscar"):
        assert outcome.level == "statistics"


@pytest.mark.parametrize(
    ("k", "v", "objectives"),
    [
        ("qqt/1", "sst/1", ("qqt_r_h_pbr", "sst_r_h_pbr")),
        ("qqt/1", "oo/1", ("qqt_r_h_pbr", "oo_r_h_pbr")),
        ("kk/1", "vv/1", ("ktk_r_h_pbr", "vtv_r_h_pbr")),
    ],
)
@pytest.mark.parametrize("shapes", [fit_shared, fit_per_head])
def test_a_rotation_of_any_covariance_can_be_written_and_read(
    shapes: Callable[[Moments, str, str], FittedPair], k: str, v: str, objectives: tuple[str, str]
) -> None:
    pair = shapes(random_moments(), k, v)
    assert (pair.k.objective, pair.v.objective) == objectives
    for side in (pair.k, pair.v):
        assert read_rotation(rotation_bytes(side), what="side").objective == side.objective


@pytest.mark.parametrize("name", FITTED)
def test_a_refit_from_the_file_is_the_same_to_the_bit(name: str) -> None:
    moments = random_moments()
    again, _ = parse_moments(moments_bytes(moments, describe(moments)))
    first, second = (fit(source, METHODS[name]) for source in (moments, again))
    assert assemble(first, facts(moments, first)) == assemble(second, facts(moments, second))


@pytest.mark.parametrize("name", FITTED)
def test_the_number_of_threads_changes_nothing(name: str) -> None:
    moments = random_moments()
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            result = fit(moments, METHODS[name])
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        results.append(
            [layer.forward.tobytes() for side in (result.k, result.v) for layer in side.layers]
        )
    assert results[0] == results[1]


def test_methods_without_data_need_only_a_geometry() -> None:
    empty = Moments(MODEL.geometry, {})
    assert possible_methods(empty) == WITHOUT_DATA
    found = fit_all(empty)
    assert [*found.results] == [*WITHOUT_DATA]
    assert {"identity", "hadamard"} <= {*WITHOUT_DATA}
    for name, matrix in (("identity", np.eye), ("hadamard", hadamard)):
        result = found.results[name]
        assert (result.coverage, dict(result.targets)) == (None, {})
        for side, width in ((result.k, MODEL.head_dim), (result.v, MODEL.v_head_dim)):
            assert side.layer_ids == MODEL.attention_layers
            assert all(np.allclose(layer.forward, matrix(width)) for layer in side.layers)


def test_all_methods_fit_from_complete_moments() -> None:
    moments = random_moments()
    found = fit_all(moments)
    assert [*found.results] == [*METHODS]
    assert found.refused == {}
    coverage = found.results["wush"].coverage
    assert coverage is not None
    assert (coverage.layers, coverage.q_heads, coverage.kv_heads, coverage.tokens_max) == (
        2,
        4,
        2,
        200,
    )


def test_methods_that_lack_their_sums_are_not_offered() -> None:
    moments = random_moments(weighted=False)
    assert possible_methods(moments) == UNWEIGHTED
    with pytest.raises(ComputeFailed, match="layer 0 weighed 0 of 200"):
        fit(moments, METHODS["oscar"])
    with pytest.raises(ComputeFailed, match="weighed 0 of 200"):
        fit_all(moments, ["hadamard", "oscar-per-head"])


def test_a_method_whose_own_result_cannot_be_served_is_reported() -> None:
    moments = random_moments()
    layer = moments.layers[2]
    basis = torch.linalg.qr(layer.kk[0])[0]
    energies = torch.logspace(0, 12, 16, dtype=torch.float64)
    layer.kk[1] = basis * energies @ basis.T
    layer.qq[1] = basis * energies.flip(0) @ basis.T
    found = fit_all(moments, ["oscar", "wush"])
    assert [*found.results] == ["oscar"]
    assert "layer 2, KV head 1" in found.refused["wush"]


def test_unknown_methods_are_named() -> None:
    with pytest.raises(UsageError, match="no method is called 'oscar2'") as info:
        find_method("oscar2")
    assert "wush" in str(info.value.hint)


def test_the_table_says_what_each_method_is() -> None:
    for name, row in TABLE.items():
        method = find_method(name)
        assert (row.name, method.name, method.tune is not None) == (name, name, row.tuned)
    assert [*METHODS, *TUNED] == sorted(TABLE, key=lambda name: TABLE[name].tuned)


@pytest.mark.parametrize("name", METHODS)
def test_the_table_says_what_the_files_of_a_method_require(name: str) -> None:
    result = fit(random_moments(), METHODS[name])
    assert {*result.k.requires, *result.v.requires} == {*TABLE[name].requires}
    assert {*TABLE["wush-tuned"].requires} == {*TABLE["wush"].requires}


def test_the_table_is_read_without_torch() -> None:
    code = (
        "import sys, oscar_zoo.compute.methods.table as t; print(*t.TABLE, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [*TABLE, "False"]
