"""Clip grids are grids of order statistics, and of equal ones the one that clips least is taken."""

from __future__ import annotations

import pytest

from oscar_kernels.spec import QuantSpec
from oscar_zoo.compute.select.clip import ClipCurve, clip_indices, index_of, ratio_of, ratio_text


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
def test_a_stored_ratio_means_its_index(head_dim: int) -> None:
    for index in range(head_dim - 1):
        spec = QuantSpec(head_dim, head_dim, ratio_of(index, head_dim))
        assert spec.clip_index == index_of(spec) == index
    last = QuantSpec(head_dim, head_dim, ratio_of(head_dim - 1, head_dim))
    assert last.clip_index is None
    assert index_of(last) == head_dim - 1


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
    assert two.best_by_layer == (56, 61)
    assert two.at(58) == (2.0, 8.0)


def test_of_equal_indices_the_one_that_clips_least_is_best() -> None:
    assert curve((1.0, 1.0, 1.0, 1.0)).best == 63
    assert curve((1.0, 1.01, 1.019, 1.5)).best == 61
    assert curve((0.0, 0.0, 1.0, 1.0)).best == 58


def test_weights_say_which_layers_count() -> None:
    layers = (1.0, 2.0, 4.0, 8.0), (8.0, 4.0, 2.0, 1.0)
    assert curve(*layers, weights=(1.0, 0.0)).best == 56
    assert curve(*layers, weights=(0.0, 1.0)).best == 63
    assert curve(*layers, weights=(1.0, 3.0)).mean == pytest.approx((6.25, 3.5, 2.5, 2.75))
    assert curve(*layers, weights=(0.0, 0.0)).mean == pytest.approx((4.5, 3.0, 3.0, 4.5))


def test_json_holds_ratios() -> None:
    found = curve((4.0, 1.0, 2.0, 3.0), (1.0, 1.0, 1.0, 1.0)).to_json()
    assert found["ratios"] == [56.5 / 64, 58.5 / 64, 61.5 / 64, 0.0]
    assert (found["best"], found["best_by_layer"]) == (58.5 / 64, [58.5 / 64, 0.0])
    assert found["errors"] == pytest.approx([2.0, 1.0, 2**0.5, 3**0.5])


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.0, "0"), (0.9, "0.90"), (0.96, "0.96"), (0.925, "0.925"), (0.9296875, "0.9297")],
)
def test_a_ratio_is_written_with_the_decimals_that_it_needs(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text
