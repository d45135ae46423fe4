"""The caches that a comparison measures, and what an element costs in each of them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from oscar_kernels.spec import row_bytes
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.evaluate.alternatives.base import Subject
from oscar_zoo.evaluate.alternatives.integers import (
    hadamard,
    hadamard_clipped,
    integers,
    transformed,
)
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel

BF16_BITS = 16.0
CONTEXTS = (8192, 32768, 131072)
"""Tokens of sequences for which a comparison also tells what an element costs."""


def caches_of(
    model: LoadedModel, artifact: tuple[RotationSet, RotationSet] | None, recipe: ServingRecipe
) -> dict[str, CacheSpec | None]:
    """`bf16`, `int2`, `int2-hadamard`, `int2-hadamard-clip`, and `artifact` where there is one;
    `None` for a cache that rounds nothing.
    """
    subject = Subject(model.block, recipe, artifact)
    caches: dict[str, CacheSpec | None] = {"bf16": None, "int2": integers(2, subject)}
    caches["int2-hadamard"] = hadamard(2, subject)
    caches["int2-hadamard-clip"] = hadamard_clipped(2, subject)
    if artifact is not None:
        caches["artifact"] = transformed(None, subject)
    for spec in reversed(list(caches.values())):  # the artifact's mismatch is the one to report
        if spec is not None:
            spec.check(model.block)
    return caches


def encode_text(model: LoadedModel, text: str) -> list[int]:
    """Token ids without special tokens."""
    ids: list[int] = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def bits_of(spec: CacheSpec | None, model: LoadedModel, length: int) -> tuple[float, float]:
    """Bits of one stored element, and of everything that a sequence of `length` tokens occupies for
    each element of its rows, high-precision windows included."""
    if spec is None:
        return BF16_BITS, BF16_BITS
    return stored_bits(spec, model.block), bits_with_windows(spec, model.block, length)


def stored_bits(spec: CacheSpec, geometry: Geometry) -> float:
    """Bits of one stored element, scales and offsets included, on average over the layers."""
    layers = range(len(geometry.attention_layers))
    specs = [spec.quant_spec("k", geometry.head_dim, index) for index in layers]
    specs += [spec.quant_spec("v", geometry.v_head_dim, index) for index in layers]
    return 8 * sum(map(row_bytes, specs)) / sum(one.head_dim for one in specs)


def bits_with_windows(spec: CacheSpec, geometry: Geometry, length: int) -> float:
    """Bits of all that a sequence of `length` tokens occupies, for each element of its rows."""
    windows = spec.recipe.windows
    # INT2 rows exist for every token, the windows on top of them.
    return stored_bits(spec, geometry) + BF16_BITS * (windows.sink + windows.recent) / length


def bits_at_contexts(spec: CacheSpec | None, model: LoadedModel) -> dict[str, float]:
    """Bits of everything that a sequence occupies, as `bits_of` counts them, by its tokens in
    `CONTEXTS`."""
    return {str(length): bits_of(spec, model, length)[1] for length in CONTEXTS}


def facts_of(model: LoadedModel, text: str, recipe: ServingRecipe) -> dict[str, Any]:
    """What a reader needs to repeat a measurement, as plain JSON values."""
    return {
        "model": {
            "id": model.block.id,
            "revision": model.block.revision,
            "config_sha256": model.block.config_sha256,
            "dtype": model.dtype,
        },
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "sink": recipe.windows.sink,
        "recent": recipe.windows.recent,
        "clip": {"k": recipe.clip.k, "v": recipe.clip.v, "algorithm": recipe.clip.algorithm},
        "group_size": recipe.group_size,
        "scale_dtype": recipe.scale_dtype,
        "quantizer": recipe.quantizer,
        "chunking": "every position exact",
        "torch": torch.__version__,
        "device": str(model.device),
    }
