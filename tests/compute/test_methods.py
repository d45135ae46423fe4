"""Every method against its formulas on the same rows, and as an artifact that passes its own
verification."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_moments import GROUP, MODEL, NUMERICS, LayerRows, describe, layer_rows, random_moments

from oscar_zoo.artifact.formats import hadamard
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, MomentsFile, WeightsInfo
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.methods.base import FitResult, eigenbasis, fit
from oscar_zoo.compute.methods.rotations import r_h_pbr
from oscar_zoo.compute.methods.table import METHODS, TABLE, fit_all, possible_methods
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import moments_bytes, parse_moments
from oscar_zoo.compute.products import symmetric
from oscar_zoo.errors import ComputeFailed, UsageError

Matrix = NDArray[np.float64]
PUBLISHED = [name for name in METHODS if TABLE[name].publishable]
UNWEIGHTED = tuple(name for name in METHODS if "weighted" not in METHODS[name].needs)
WITHOUT_DATA = tuple(name for name in METHODS if not METHODS[name].needs)
FITTED = [name for name in PUBLISHED if METHODS[name].needs]


MOMENTS = random_moments()
RECIPE = ServingRecipe(group_size=8, clip=Clip(k=0.96, v=0.92))
FACTS = Facts(
    artifact_id=ArtifactId("random", "seq200_prompt1_group8"),
    model=MODEL,
    recipe=RECIPE,
    calibration=describe(MOMENTS).calibration,
    numerics=NUMERICS,
    created="2026-01-02T03:04:05Z",
)


def facts(result: FitResult) -> Facts:
    return FACTS if result.method.needs else replace(FACTS, calibration=None, numerics=None)


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
    result = fit(MOMENTS, METHODS[name])
    files = assemble(result, facts(result))
    outcome = verify_files(files, strict=True)
    assert isinstance(outcome, Verified), outcome
    assert outcome.grade == "fp64" or name == "wush"
    manifest = Manifest.from_bytes(files[FILE_NAME])
    expected = {
        "hadamard": (1, "layer", (), "hadamard"),
        "oscar": (1, "layer", (), "qqt_r_h_pbr"),
        "oscar-exact": (1, "layer", (), "qqt_r_h_pbr"),
        "oscar-per-head": (2, "kv_head", ("per_head",), "perhead"),
        "wush": (3, "kv_head", ("per_head", "k_partner", "v_partner", "k_feedback"), "wush"),
    }[name]
    assert (manifest.format_version, manifest.grouping, manifest.recipe.requires) == expected[:3]
    assert f"k_rotation_{expected[3]}.pt" in files
    assert manifest.fit.method == name
    assert (manifest.statistics is None) == (name in WITHOUT_DATA)
    if name.startswith("oscar"):
        assert outcome.level == "statistics"


def _changed(name: str) -> Moments:
    """Moments of rows that another model would have, with channels that are zero, or one that
    nearly repeats another."""
    mixing = np.eye(MODEL.head_dim)
    if name == "padding":
        mixing[:, 5:] = 0
    elif name == "nearly dependent":
        mixing[:, 7] = mixing[:, 3] + 1e-9 * mixing[:, 7]
    on_rows, layers = torch.from_numpy(mixing), {}
    for layer, sums in MOMENTS.layers.items():
        changed = copy.deepcopy(sums)
        for matrix in ("qq", "kk"):
            whole = on_rows.T @ symmetric(getattr(sums, matrix)) @ on_rows
            setattr(changed, matrix, torch.tril(whole))
        layers[layer] = changed
    return replace(MOMENTS, layers=layers)


@pytest.mark.parametrize("method", FITTED)
@pytest.mark.parametrize("name", ["padding", "nearly dependent"])
def test_channels_that_carry_nothing_are_fitted_by_every_method(name: str, method: str) -> None:
    result = fit(_changed(name), METHODS[method])
    outcome = verify_files(assemble(result, facts(result)), strict=True)
    assert isinstance(outcome, Verified), outcome


@pytest.mark.parametrize("name", FITTED)
def test_a_refit_from_the_file_is_the_same_to_the_bit(name: str) -> None:
    again, _ = parse_moments(moments_bytes(MOMENTS, describe(MOMENTS)))
    first, second = (fit(source, METHODS[name]) for source in (MOMENTS, again))
    assert assemble(first, facts(first)) == assemble(second, facts(second))


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


def test_signs_do_not_depend_on_what_the_solver_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    c = torch.from_numpy(covariance(16, 5))
    want, _ = r_h_pbr(c)
    solve = torch.linalg.eigh
    flips = torch.from_numpy(np.resize([1.0, -1.0, -1.0], 16))
    monkeypatch.setattr(torch.linalg, "eigh", lambda one: (solve(one)[0], solve(one)[1] * flips))
    assert torch.equal(r_h_pbr(c)[0], want)


@pytest.fixture(scope="module")
def oscar() -> FitResult:
    return fit(MOMENTS, METHODS["oscar"])


def manifest(result: FitResult, facts: Facts) -> Manifest:
    files = assemble(result, facts)
    assert isinstance(verify_files(files, strict=True), Verified)
    return Manifest.from_bytes(files[FILE_NAME])


def test_the_blocks_of_the_caller_stand_in_the_manifest(oscar: FitResult) -> None:
    candidates = ({"method": "oscar", "ppl": 9.5},)
    selection = {"rule": "auto/1", "candidates": candidates, "chosen": "oscar"}
    quality = {"gates": [{"name": "perplexity", "result": "pass"}]}
    source = MomentsFile(sha256="ab" * 32, size=12, location="moments.safetensors")
    facts = replace(
        FACTS,
        selection=selection,
        quality=quality,
        moments=source,
        coverage=MOMENTS.observed(tp=2, dp=3),
    )
    found = manifest(oscar, facts)
    assert found.fit.selection == {**selection, "candidates": [*candidates]}
    assert (found.fit.moments, found.fit.coverage) == (source, facts.coverage)
    assert found.quality == quality
    rotation = read_rotation(assemble(oscar, facts)["k_rotation_qqt_r_h_pbr.pt"], what="k")
    assert rotation.calibration["tp_size"] == 2


def test_headroom_and_condition_of_a_partnered_method_are_recorded() -> None:
    wush = fit(MOMENTS, METHODS["wush"])
    quality = manifest(wush, replace(FACTS, quality={"gates": []})).quality
    assert quality is not None and quality["gates"] == []
    for role, forecast in wush.forecasts.items():
        of_layers = {
            "headroom": forecast.headroom.mean(-1),
            "condition": forecast.condition.max(-1),
        }
        for name, want in of_layers.items():
            assert quality[f"{name}_per_layer"][role] == pytest.approx(want, rel=1e-3)
    assert np.min(quality["headroom_per_layer"]["k"]) >= 1


@pytest.mark.parametrize(
    ("changes", "absorption"),
    [
        ({}, "allowed"),
        ({"output_gate": True}, "forbidden"),
        ({"output_gate": None}, "forbidden"),
        ({"weights": None}, "forbidden"),
        ({"weights": WeightsInfo(dtype="float8_e4m3fn", quantization="fp8")}, "forbidden"),
    ],
)
def test_values_are_folded_only_where_that_is_exact(
    oscar: FitResult, changes: dict[str, object], absorption: str
) -> None:
    facts = replace(FACTS, model=MODEL.model_copy(update=changes))
    assert manifest(oscar, facts).recipe.v_absorption == absorption
    required = replace(facts, recipe=RECIPE.model_copy(update={"v_absorption": "required"}))
    if absorption == "allowed":
        assert manifest(oscar, required).recipe.v_absorption == "required"
        return
    with pytest.raises(UsageError, match="cannot be folded into the weights of oscar-zoo/random"):
        assemble(oscar, required)
