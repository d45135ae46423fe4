"""Fits measured on held-out rows: the numbers are those of `quality`, and the clip found is the
best of its curve."""

import pytest
import torch
from attention_rows import WINDOWS, random_rows
from tiny_artifacts import cache_shape

from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.compute.capture.rows import LayerRows
from oscar_zoo.compute.methods import rotations
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.select.attention_errors import (
    ClipCurve,
    Fidelity,
    LayerBench,
    clip_indices,
    measure_fits,
)
from oscar_zoo.evaluate.simulated_cache import cache_side

GEOMETRY = cache_shape(4, heads=4, kv_heads=2, dim=16, v_dim=32, at=(1, 3))
RECIPE = ServingRecipe(group_size=16, clip=Clip(k=0.9, v=0.8), windows=WINDOWS)


def source(layer_id: int) -> LayerRows:
    return random_rows(dims=(16, 32), lengths=(40,), seed=layer_id)


def fits() -> dict[str, tuple]:  # type: ignore[type-arg]
    plain = rotations.IDENTITY.fit(Moments(GEOMETRY, {}))
    return {
        "identity": (plain.k, plain.v),
        "hadamard": (hadamard_set(GEOMETRY, "k"), hadamard_set(GEOMETRY, "v")),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Fidelity]:
    return measure_fits(source, GEOMETRY, fits(), RECIPE)


def test_clips_are_found_recipes_and_none(found: dict[str, Fidelity]) -> None:
    for one in found.values():
        assert one.k_curve.indices == clip_indices(16, 14)
        assert one.v_curve.indices == clip_indices(32, 25)
        clips = [(errors.clip.k, errors.clip.v) for errors in one.clips]
        assert len(set(clips)) == len(clips)
        assert {(0.9, 0.8), (0.0, 0.0)} <= set(clips)
        best_k = QuantSpec(16, 16, one.found.clip.k).clip_index
        assert (15 if best_k is None else best_k) == one.k_curve.best
        assert one.of(RECIPE.clip) is not None
        assert one.of(Clip(k=0.5, v=0.5)) is None


def test_numbers_are_those_of_one_cache_at_a_time(found: dict[str, Fidelity]) -> None:
    k, v = fits()["hadamard"]
    errors = found["hadamard"].of(RECIPE.clip)
    assert errors is not None
    retrieval = []
    for position, layer in enumerate(GEOMETRY.attention_layers):
        cpu = torch.device("cpu")
        side_k = cache_side(k, layer, QuantSpec(16, 16, 0.9), cpu)
        side_v = cache_side(v, layer, QuantSpec(32, 16, 0.8), cpu)
        bench = LayerBench(layer, source(layer), WINDOWS)
        want = bench.caches([(side_k, side_v)])[0]
        got = (errors.output[position], errors.k_only[position], errors.logit[position])
        assert got == pytest.approx(want, rel=1e-5)
        assert errors.v_only[position] == pytest.approx(bench.values([side_v])[0], rel=1e-5)
        (lost,), focus = bench.retrieval([side_k])
        retrieval.append((lost * focus, focus))
    assert errors.retrieval == pytest.approx(
        sum(a for a, _ in retrieval) / sum(b for _, b in retrieval), rel=1e-5
    )
    assert min(errors.output) < errors.output_geo < max(errors.output)


@pytest.mark.parametrize(
    ("head_dim", "indices"),
    [
        (64, (56, 57, 58, 60, 61, 62, 63)),
        (128, (112, 115, 117, 120, 122, 125, 127)),
        (256, (225, 230, 235, 240, 245, 250, 255)),
    ],
)
def test_the_grid_has_the_ratios_and_no_clipping(head_dim: int, indices: tuple[int, ...]) -> None:
    assert clip_indices(head_dim) == indices
    assert clip_indices(head_dim, 3, None, head_dim - 1) == (3, *indices)


def curve(*layers: tuple[float, ...], weights: tuple[float, ...] | None = None) -> ClipCurve:
    return ClipCurve(64, (56, 58, 61, 63), layers, weights)


def test_the_best_index_has_the_least_mean_error() -> None:
    assert curve((4.0, 1.0, 2.0, 3.0)).best == 58
    two = curve((1.0, 2.0, 4.0, 8.0), (64.0, 8.0, 1.0, 2.0))
    assert two.mean == pytest.approx((8.0, 4.0, 2.0, 4.0))
    assert two.best == 61
    assert two.to_json()["best_by_layer"] == [56.5 / 64, 61.5 / 64]
    assert two.at(58) == (2.0, 8.0)


def test_of_equal_indices_the_one_that_clips_least_is_best() -> None:
    assert curve((1.0, 1.0, 1.0, 1.0)).best == 63
    assert curve((1.0, 1.01, 1.019, 1.5)).best == 61
    assert curve((0.0, 0.0, 1.0, 1.0)).best == 58
