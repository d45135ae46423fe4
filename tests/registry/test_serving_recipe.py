"""The settings that a model without a recipe of the zoo is calibrated and served with."""

from __future__ import annotations

import pytest
from tiny_artifacts import TINY

from oscar_kernels.spec import QuantSpec, group_channels
from oscar_zoo.registry.recipe import serving_recipe


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "group"),
    [
        (128, 128, 128),
        (256, 128, 128),
        (64, 64, 64),
        (128, 64, 64),
        (64, 128, 64),
        (256, 64, 64),
        (96, 96, 96),
        (192, 128, 128),
    ],
)
def test_the_default_groups_cut_the_rows_of_k_and_of_v(
    head_dim: int, v_head_dim: int, group: int
) -> None:
    geometry = TINY.model_copy(update={"head_dim": head_dim, "v_head_dim": v_head_dim})
    recipe = serving_recipe(None, geometry)
    assert recipe.group_size == group
    for width in (head_dim, v_head_dim):
        assert QuantSpec(width, group_channels(width, group)).num_groups in (1, 2, 4)
