"""Group sizes that do not go with a model are refused with one that does."""

from __future__ import annotations

import pytest
from tiny_artifacts import TINY

from oscar_zoo.artifact.manifest import ModelBlock, WeightsInfo
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.compute.options import ComputeOptions, sequence_length
from oscar_zoo.compute.width_wish import WidthWish, check_wish
from oscar_zoo.errors import UsageError


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "group", "cause", "hint"),
    [
        (64, 64, 48, "group_size 48 does not divide head_dim 64", "64"),
        (128, 128, 16, "8 groups per row; 1, 2 or 4 are supported", "128"),
        (192, 192, 64, "3 groups per row; 1, 2 or 4 are supported", "192"),
        (192, 128, 32, "6 groups per row; 1, 2 or 4 are supported", "128"),
    ],
)
def test_a_group_size_that_does_not_go_with_the_rows(
    head_dim: int, v_head_dim: int, group: int, cause: str, hint: str
) -> None:
    geometry = TINY.model_dump() | {"head_dim": head_dim, "v_head_dim": v_head_dim}
    block = ModelBlock(
        **geometry,
        id="org/model",
        revision=None,
        config_sha256=None,
        rope=None,
        qk_norm=None,
        output_gate=None,
        weights=WeightsInfo(dtype="bfloat16"),
        compatible_with=(),
    )
    recipe = ServingRecipe(group_size=group, clip=Clip(k=0.0, v=0.0))
    with pytest.raises(UsageError) as caught:
        sequence_length(ComputeOptions("org/model", "model", "text", 100, recipe), block)
    assert caught.value.message == f"a group size of {group} does not go with org/model: {cause}."
    assert caught.value.hint == f"use a group size of {hint}"
    with pytest.raises(UsageError) as early:  # before anything is read
        check_wish(WidthWish(bits=3.0), recipe, block)
    assert str(early.value) == str(caught.value)
