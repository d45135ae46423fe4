"""An INT2 cache on its way to the ranks of an engine: both transforms and the recipe, in a folder.

The files are temporary. They hold transforms that no artifact can have too, such as `identity`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.formats import Array, LayerTransform, RotationSet
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.evaluate.simulated_cache import CacheSpec

_RECIPE = "recipe.json"
_ARRAYS = ("forward", "partner", "mean")
_FIELDS = ("format_version", "objective", "grouping", "transform", "orthogonal", "centered", "role")


def write_cache(folder: Path, cache: CacheSpec) -> None:
    """Write a cache to a new folder.

    Raises:
        StorageError: the disk refused.
    """
    with durable.storage_errors(f"cannot write to {folder}"):
        folder.mkdir()
        for name, side in (("k", cache.k), ("v", cache.v)):
            if side is not None:
                _write_side(folder / name, side)
        (folder / _RECIPE).write_text(cache.recipe.model_dump_json(), encoding="utf-8")


def read_cache(folder: Path, heads: Sequence[int]) -> CacheSpec:
    """What `write_cache` wrote, for the KV heads of one rank.

    Args:
        folder: written before.
        heads: the model's indices of these heads.
    """
    k, v = (_read_side(folder / name, list(heads)) for name in ("k", "v"))
    recipe = ServingRecipe.model_validate_json((folder / _RECIPE).read_bytes())
    return CacheSpec(k, v, recipe)


def _write_side(place: Path, side: RotationSet) -> None:
    arrays = {
        f"{name}.{layer.layer_id}": np.ascontiguousarray(array)
        for layer in side.layers
        for name in _ARRAYS
        if (array := getattr(layer, name)) is not None
        and not (name == "partner" and array is layer.forward)
    }
    save_file(arrays, place.with_suffix(".safetensors"))
    facts = {name: getattr(side, name) for name in _FIELDS} | {"layers": side.layer_ids}
    place.with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")


def _read_side(place: Path, heads: list[int]) -> RotationSet | None:
    if not place.with_suffix(".json").exists():
        return None
    facts: dict[str, Any] = json.loads(place.with_suffix(".json").read_bytes())
    arrays = load_file(place.with_suffix(".safetensors"))
    if facts["grouping"] == "kv_head":
        arrays = {name: array[heads] for name, array in arrays.items()}
    layers = tuple(_layer(layer_id, arrays) for layer_id in facts.pop("layers"))
    return RotationSet(**facts, layers=layers)


def _layer(layer_id: int, arrays: dict[str, Array]) -> LayerTransform:
    forward, partner, mean = (arrays.get(f"{name}.{layer_id}") for name in _ARRAYS)
    assert forward is not None  # every layer has one
    return LayerTransform(layer_id, forward, forward if partner is None else partner, mean)
