"""A `config.json` for a recipe of the zoo, completed by the class of transformers for its model.

Counts come from the recipe. Which layers have full attention comes from the class wherever it has a
rule for that, such as an interval or a pattern of windows, so that the recipe is compared with it.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.registry.recipe import ModelRecipe

PARTS = frozenset(
    (
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "llama4",
        "mistral3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
    )
)
"""Model types whose language model has a configuration of its own inside."""


Says = Callable[[Geometry], dict[str, Any]]


def _kinds(name: str, full: str, other: str) -> Says:
    return lambda shape: {
        name: [
            full if layer in shape.attention_layers else other for layer in range(shape.num_layers)
        ]
    }


def _gemma4(shape: Geometry) -> dict[str, Any]:
    """Window layers have heads of their own."""
    return {
        "head_dim": 256,
        "global_head_dim": shape.head_dim,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": shape.num_kv_heads,
        "num_key_value_heads": shape.num_q_heads // 2,
    }


EXTRA: Mapping[str, Says] = {
    "exaone4": lambda _: {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4,
    "glm4_moe_lite": lambda shape: {"head_dim": shape.rotary_key},
    "granitemoehybrid": _kinds("layer_types", "attention", "mamba"),
    "lfm2": lambda shape: {"full_attn_idxs": list(shape.attention_layers)},
    "lfm2_moe": _kinds("layer_types", "full_attention", "conv"),
    "mistral": lambda _: {"sliding_window": None},
    "mistral3": lambda _: {"model_type": "mistral", "sliding_window": None},
    "mixtral": lambda _: {"sliding_window": None},
    "nemotron_h": _kinds("layers_block_type", "attention", "mamba"),
    "phi3": lambda _: {"sliding_window": 262144},
}
"""What a checkpoint of a type says besides counts. The classes of the hybrids named here have no
rule of their own."""


INTERVAL = {"full_attention_interval": 4}
OF_HUB: Mapping[str, dict[str, Any]] = {
    "exaone4": {"rope_parameters": None, "rope_theta": 1e6},
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen3_5": INTERVAL,
    "qwen3_5_moe": INTERVAL,
    "qwen3_next": INTERVAL,
}
"""What the file on the hub says, and transformers would not write."""


def write_config(folder: Path, recipe: ModelRecipe) -> Path:
    shape = recipe.geometry
    text = {
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_q_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_size": shape.num_q_heads * shape.head_dim,
        "max_position_embeddings": 131072,
    } | EXTRA.get(recipe.model_type, lambda _: {})(shape)
    values = {"text_config": text} if recipe.model_type in PARTS else text
    config = AutoConfig.for_model(recipe.model_type, **values)  # type: ignore[no-untyped-call]
    folder.mkdir(parents=True, exist_ok=True)
    said = config.to_dict() | {"architectures": ["OfItsHub"]}
    said.get("text_config", said).update(OF_HUB.get(recipe.model_type, {}))
    (folder / "config.json").write_text(json.dumps(said))
    return folder
