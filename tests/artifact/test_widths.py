"""Bits for each layer and side in recipes and manifests."""

import json
from typing import Any

import pytest
from pydantic import ValidationError
from tiny_artifacts import manifest, payload

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.specs import Clip, ServingRecipe, SideWidths, Widths
from oscar_zoo.errors import MalformedFile

CLIP = Clip(k=0.96, v=0.92)
MIXED = Widths(
    k=SideWidths(bits=(4, 2, 2, 2), clip=(0.0, 0.96, 0.96, 0.94)),
    v=SideWidths(bits=(2, 2, 2, 2), clip=(0.92, 0.92, 0.9, 0.92)),
)


def made(**changes: Any) -> dict[str, Any]:
    """The JSON of a manifest with these widths."""
    return {**manifest(payload(), widths=MIXED).to_json(), **changes}


def read(value: dict[str, Any]) -> Manifest:
    return Manifest.from_bytes(json.dumps(value).encode())


def test_bits_and_clips_are_told_for_each_layer_and_side() -> None:
    recipe = read(made()).recipe
    assert [recipe.code_bits("k", index) for index in range(4)] == [4, 2, 2, 2]
    assert recipe.code_bits("v", 0) == 2
    assert [recipe.clip_ratio("k", index) for index in range(4)] == [0.0, 0.96, 0.96, 0.94]
    assert recipe.clip_ratio("v", 2) == 0.9
    assert recipe.bits_per_element == 2.25 + 32 / 64


def test_a_recipe_without_widths_is_written_as_before() -> None:
    recipe = ServingRecipe(group_size=64, clip=CLIP)
    assert "widths" not in recipe.model_dump(mode="json")
    again = recipe.with_widths(MIXED).with_widths(None)
    assert again == recipe and again.model_dump() == recipe.model_dump()
    assert (recipe.code_bits("k", 3), recipe.clip_ratio("v", 3)) == (2, 0.92)
    assert manifest(payload()).to_json()["schema"] == "oscar-zoo.manifest/1"


def test_codes_of_4_bits_are_not_clipped_by_the_ratios_of_2() -> None:
    widths = Widths.uniform(3, k=4, v=2, clip=CLIP)
    assert widths.k == SideWidths(bits=(4, 4, 4), clip=(0.0, 0.0, 0.0))
    assert widths.v == SideWidths(bits=(2, 2, 2), clip=(0.92, 0.92, 0.92))
    assert widths.mean_bits == 3


SHORT = Widths.uniform(3, k=4, v=2, clip=CLIP)
RECIPE = made()["recipe"]


@pytest.mark.parametrize(
    "value",
    [
        made(schema="oscar-zoo.manifest/1"),
        {**manifest(payload()).to_json(), "schema": "oscar-zoo.manifest/2"},
        made(recipe=RECIPE | {"quantizer": "asym-minmax-u2/1"}),
        made(recipe=RECIPE | {"widths": SHORT.model_dump(mode="json")}),
    ],
    ids=["old schema", "new schema", "old quantizer", "fewer layers"],
)
def test_schema_quantizer_layers_and_widths_belong_together(value: dict[str, Any]) -> None:
    with pytest.raises(MalformedFile) as caught:
        read(value)
    assert caught.value.reason == "manifest.schema" and "widths" in caught.value.message


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (SideWidths, {"bits": (2, 2), "clip": (0.9,)}),
        (SideWidths, {"bits": (3,), "clip": (0.9,)}),
        (Widths, {"k": MIXED.k, "v": SHORT.v}),
    ],
)
def test_every_layer_has_an_entry_of_2_or_4_bits(kind: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind(**given)
