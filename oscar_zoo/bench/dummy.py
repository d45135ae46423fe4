"""A model without weights and an artifact without data, for measurements of speed.

The time per token does not depend on the numbers in the cache, so random weights and any orthogonal
rotation are as good as trained ones. One thing differs: experts of a mixture get equal load.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from oscar_zoo.artifact.formats import Role, hadamard_set
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.errors import UsageError
from oscar_zoo.models import config_file
from oscar_zoo.registry.recipe import ModelRecipe

ROOM = 128
"""Positions beyond the longest request, because SGLang keeps a few for itself."""
PREPARES_INPUT = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files without which SGLang does not start a model that has images, even for token ids."""


def config_of_recipe(recipe: ModelRecipe) -> dict[str, Any]:
    """A `config.json` with the shapes of a model of the zoo."""
    shapes, cache = recipe.weights, recipe.geometry
    if shapes is None:
        raise UsageError(
            f"the zoo does not know all shapes of {recipe.name}.",
            hint="give a folder that holds its config.json",
        )
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": shapes.family,
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.intermediate_size,
        "num_hidden_layers": cache.num_layers,
        "num_attention_heads": cache.num_q_heads,
        "num_key_value_heads": cache.num_kv_heads,
        "head_dim": cache.head_dim,
        "vocab_size": shapes.vocab_size,
        "max_position_embeddings": shapes.max_position,
        "tie_word_embeddings": shapes.tied_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def longest_context(config: dict[str, Any]) -> int | None:
    """Positions a model was made for, or `None` when its configuration does not say."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("max_position_embeddings"), int):
            return int(part["max_position_embeddings"])
    return None


def write_model(folder: Path, config: dict[str, Any], *, longest: int) -> None:
    """Write `config` to the new folder `folder`, with at least `longest` positions.

    Args:
        longest: tokens of the longest request, prompt and answer.
    """
    config = json.loads(json.dumps(config))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("max_position_embeddings"), int):
            part["max_position_embeddings"] = max(part["max_position_embeddings"], longest + ROOM)
    folder.mkdir(mode=0o700)
    (folder / config_file.NAME).write_text(json.dumps(config, indent=1), encoding="utf-8")


def copy_what_prepares_input(source: Path, folder: Path) -> None:
    """Copy the `PREPARES_INPUT` files of the model folder `source`, those that it has."""
    for name in PREPARES_INPUT:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_rotations(folder: Path, geometry: Geometry) -> None:
    """Write a K and a V file with the Hadamard matrix in every layer to the new folder `folder`."""
    folder.mkdir(mode=0o700)
    roles: tuple[Role, Role] = ("k", "v")
    for role in roles:
        content = rotation_bytes(hadamard_set(geometry, role))
        (folder / f"{role}_rotation.pt").write_bytes(content)
