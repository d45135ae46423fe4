"""Does a model fit a GPU, and how many tokens of it: an estimate from shapes alone, without torch.

Only layers with full attention are counted; the calculation is `engines/sglang/capacity.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.engines.sglang.capacity import BF16_BYTES, caches, room
from oscar_zoo.engines.sglang.concurrency import Layout, usual_requests
from oscar_zoo.models import nvidia_smi
from oscar_zoo.registry.recipe import ModelRecipe


def estimate_memory(
    recipe: ModelRecipe | None, manifests: Sequence[Manifest], gpu_memory: int | None = None
) -> dict[str, Any] | None:
    """What a model needs, and what fits on each kind of GPU; `None` where no shapes are known.

    Args:
        recipe: of the model, where the zoo knows it.
        manifests: of its artifacts. Where all have one recipe, it is the one that counts; the first
            one says the shapes where the zoo does not know them.
        gpu_memory: bytes of one GPU to answer for, instead of those that are visible.
    """
    cards = [("GPU", gpu_memory)] if gpu_memory else _visible()
    if recipe is not None:
        alike = manifests and all(one.recipe == manifests[0].recipe for one in manifests)
        serving = manifests[0].recipe if alike else recipe.serving  # widths, above all
        return estimate(recipe.geometry, serving, recipe.parameters, recipe.tensor_parallel, cards)
    if not manifests:
        return None
    first = manifests[0]
    return estimate(first.model.geometry, first.recipe, None, 1, cards)


def estimate(
    geometry: Geometry,
    serving: ServingRecipe,
    parameters: int | None,
    tensor_parallel: int,
    cards: Sequence[tuple[str, int]],
) -> dict[str, Any] | None:
    """Bytes of weights and of a token, and tokens that fit.

    Args:
        geometry: shape of the cache.
        serving: group size, type of scales and windows.
        parameters: of the model, or `None` where nobody knows.
        tensor_parallel: GPUs that share the model.
        cards: name and bytes of each kind of GPU.

    Returns:
        Plain JSON values, or `None` where the INT2 cache does not take such heads. `tokens` are
        `None` where the size of the weights is not known, and 0 where nothing is left for a cache.
    """
    spread = Layout(tp=tensor_parallel)
    try:
        whole_bf16, _, whole_int2 = caches(geometry, serving, Layout())
        bf16, _, int2 = caches(geometry, serving, spread)
    except ValueError:
        return None
    weights = None if parameters is None else BF16_BYTES * parameters
    kinds = []
    for name, memory in cards:
        requests = usual_requests(memory, bf16.token, serving.windows, spread)
        fits: dict[str, int | None] = {"int2_tokens": None, "bf16_tokens": None}
        if weights is not None:
            left = room(memory, weights, spread)
            fits = {
                "int2_tokens": max(0, (left - requests * int2.request) // int2.token),
                "bf16_tokens": left // bf16.token,
            }
        kinds.append(
            {"name": name, "memory_bytes": memory, "gpus": tensor_parallel, "requests": requests}
            | fits
        )
    return {
        "estimate": True,
        "weights_bytes": weights,
        "int2_token_bytes": whole_int2.token,
        "bf16_token_bytes": whole_bf16.token,
        "window_bytes_per_request": whole_int2.request,
        "gpus": kinds,
    }


def _visible() -> list[tuple[str, int]]:
    """Every kind of GPU that programs see here."""
    return list(
        dict.fromkeys((card.name, card.memory) for card in nvidia_smi.visible(nvidia_smi.gpus()))
    )
