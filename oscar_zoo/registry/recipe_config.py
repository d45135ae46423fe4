"""What a recipe says about a model in the words of its `config.json`.

So code that reads a file answers for a name, too. Needs no torch.
"""

from __future__ import annotations

from dataclasses import replace

from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.geometry import FULL_ATTENTION, SLIDING_ATTENTION
from oscar_zoo.models.other_layers import OtherLayers, kept_by_others, other_layers
from oscar_zoo.registry.recipe import ModelRecipe

_WINDOW = "sliding_window"
_OTHER = "linear_attention"
"""Stands for every kind of layer that keeps a state."""
_KINDS = ("hybrid_override_pattern", "layers_block_type")
"""Where a file says the kind of every layer in words of its own."""
_CHUNKED = ("llama4",)
"""Model types whose other layers keep tokens of chunks, which no server of ours has."""


def config_of_recipe(recipe: ModelRecipe) -> ConfigFile:
    """A `config.json` with what the recipe knows; everything else is missing."""
    return ConfigFile(_values(recipe))


def others_of_recipe(recipe: ModelRecipe) -> OtherLayers | None:
    """What the layers without full attention keep, as far as the recipe tells; `None` where it does
    not say what kind of layers they are."""
    values, layers = _values(recipe), recipe.geometry.attention_layers
    kept = kept_by_others(recipe, recipe.geometry)
    if recipe.model_type in _CHUNKED:
        return None
    if kept == "states":
        found = other_layers(ConfigFile(values), layers)
        return OtherLayers(state=None) if found is None else found
    if kept == "windows" and _WINDOW not in values:
        # How many tokens a window has does not change what one token takes.
        found = other_layers(ConfigFile(values | {_WINDOW: 1}), layers)
        return None if found is None else replace(found, window=None)
    return other_layers(ConfigFile(values), layers)


def _values(recipe: ModelRecipe) -> dict[str, object]:
    shape = recipe.geometry
    windows = kept_by_others(recipe, shape) == "windows"
    other = SLIDING_ATTENTION if windows else _OTHER
    values: dict[str, object] = {}
    if shape.v_head_dim != shape.head_dim:
        values["v_head_dim"] = shape.v_head_dim
    if not any(name in recipe.config for name in _KINDS):
        values["layer_types"] = [
            FULL_ATTENTION if layer in shape.attention_layers else other
            for layer in range(shape.num_layers)
        ]
    return {
        "model_type": recipe.model_type,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_q_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        **values,
        **recipe.config,
    }
