"""What recipes say in the words of `config.json` agrees with their geometry and with the sizes that
the makers of the models state."""

from __future__ import annotations

import pytest

from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.geometry import FULL_KINDS, layer_kinds
from oscar_zoo.models.weight_count import weights_of_config, weights_of_name
from oscar_zoo.registry.catalog import Catalog, recipe_for
from oscar_zoo.registry.recipe import ModelRecipe, config_of_recipe

RECIPES = Catalog.packaged().recipes()
STATED = {
    "GLM-4.5": 355, "GLM-4.5-Air": 106, "GLM-4.7-FP8": 355, "MiniMax-M2": 230, "MiniMax-M2.5": 230,
    "MiniMax-M2.7": 230, "Mistral-Large-Instruct-2411": 123, "Mixtral-8x22B-Instruct-v0.1": 141,
    "Mixtral-8x7B-Instruct-v0.1": 46.7, "Phi-4-mini-instruct": 3.8, "c4ai-command-r7b-12-2024": 8,
    "gpt-oss-120b": 117, "gpt-oss-20b": 21, "granite-4.0-h-tiny": 7, "phi-4": 14.7,
}  # fmt: skip
"""Billions of numbers that the makers state, where a name has no size. Command R7B has 7 without
its embeddings."""


def numbers(recipe: ModelRecipe) -> float | None:
    """All numbers of a model by the shapes in its recipe, in whatever format they are."""
    values = config_of_recipe(recipe).as_written
    counted = weights_of_config(ConfigFile(values | {"quantization_config": None}))
    return None if counted is None else counted / 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.name)
def test_shapes_have_as_many_numbers_as_the_maker_states(recipe: ModelRecipe) -> None:
    """Names are rounded, and count towers for images, which the shapes leave out."""
    counted = numbers(recipe)
    if recipe.name in STATED:
        assert counted is not None and abs(counted / (STATED[recipe.name] * 1e9) - 1) < 0.025
    elif counted is not None and recipe.model_type != "qwen3":
        named = weights_of_name(recipe.name.replace("-FP8", ""))
        assert named is not None and abs(2 * counted / named - 1) < 0.09


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 23),
        ("NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 40),
        ("NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8", 48),
    ],
)
def test_the_pattern_of_nemotron_has_the_attention_of_its_geometry(name: str, states: int) -> None:
    recipe = recipe_for(name)
    assert recipe is not None
    kinds = layer_kinds(config_of_recipe(recipe))
    assert kinds is not None and len(kinds) == recipe.geometry.num_layers
    attention = tuple(layer for layer, kind in enumerate(kinds) if kind in FULL_KINDS)
    assert attention == recipe.geometry.attention_layers
    assert sum(kind in ("M", "mamba") for kind in kinds) == states


def test_windows_are_shorter_than_the_context() -> None:
    for recipe in RECIPES:
        window = recipe.config.get("sliding_window")
        longest = recipe.config.get("max_position_embeddings", 32_768)
        if window is not None:
            assert isinstance(window, int) and isinstance(longest, int)
            assert 128 <= window < longest and window & (window - 1) == 0
            assert len(recipe.geometry.attention_layers) < recipe.geometry.num_layers
