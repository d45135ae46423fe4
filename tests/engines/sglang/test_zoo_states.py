"""The states that recipes of the zoo describe are those that SGLang allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_calls import CLASSES
from engines import RELEASES, Engines, needs_sglang

from oscar_zoo.models.other_layers import STATES_PER_REQUEST
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.recipe import ModelRecipe, config_of_recipe, others_of_recipe

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

WORDS = {
    "granitemoehybrid": ("attention", "mamba"),
    "lfm2": ("full_attention", "conv"),
    "lfm2_moe": ("full_attention", "conv"),
}
"""What files of a type call layers with attention, and the others."""


def as_published(recipe: ModelRecipe) -> dict[str, Any]:
    """The configuration of a recipe in the words of the files that SGLang reads."""
    values = config_of_recipe(recipe).as_written
    kind, shape = recipe.model_type, recipe.geometry
    if kind in WORDS:
        full, other = WORDS[kind]
        layers = range(shape.num_layers)
        values["layer_types"] = [
            full if layer in shape.attention_layers else other for layer in layers
        ]
    if kind == "falcon_h1":
        del values["layer_types"]
        values["mamba_d_ssm"] = values["mamba_n_heads"] * values["mamba_d_head"]
    if kind.startswith("qwen3"):
        values["full_attention_interval"] = 4
    return values


@pytest.mark.parametrize("release", RELEASES)
def test_the_states_of_the_zoo_are_those_of_sglang(release: str, tmp_path: Path) -> None:
    recipes = [one for one in Catalog.packaged().recipes() if one.model_type in CLASSES]
    runs = Engines(tmp_path, release)
    try:
        found = runs.call(
            "engine_calls:state_bytes", configs={one.name: as_published(one) for one in recipes}
        )
    finally:
        runs.close()
    assert len(found) == len(recipes) > 15
    for recipe in recipes:
        others = others_of_recipe(recipe)
        assert others is not None and others.state is not None
        assert others.state == STATES_PER_REQUEST * found[recipe.name][0], recipe.name
    assert found["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"][1] == 23  # the other 23 are experts
    states, layers = found["Qwen3-Next-80B-A3B-Instruct"]
    assert (states // 10**6, layers) == (77, 36)
