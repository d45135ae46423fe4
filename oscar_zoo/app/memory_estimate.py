"""Does a model fit a GPU, and how many tokens of it: what `info` says, without torch.

The numbers are those of `fit-gpu`, for as many requests as `serve` lets run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oscar_zoo.app.gpu_share import gpu_share
from oscar_zoo.app.model_needs import Needs, needs_of_manifest, needs_of_recipe
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.engines.sglang.capacity import caches
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.models import hardware
from oscar_zoo.registry.recipe import ModelRecipe


def estimate_memory(
    recipe: ModelRecipe | None, manifests: Sequence[Manifest], gpu_memory: int | None = None
) -> dict[str, Any] | None:
    """What a model needs, and what fits on each kind of GPU; `None` where no shapes are known.

    Args:
        manifests: of its artifacts. Where all have one recipe, it is the one that counts; the first
            one says the shapes where the zoo does not know them.
        gpu_memory: bytes of one GPU to answer for, instead of those that are visible.
    """
    cards = [("GPU", gpu_memory)] if gpu_memory else _visible()
    if recipe is not None:
        needs = needs_of_recipe(recipe)
        alike = manifests and all(one.recipe == manifests[0].recipe for one in manifests)
        # the recipe of artifacts has widths, above all
        return estimate(replace(needs, serving=manifests[0].recipe) if alike else needs, cards)
    return estimate(needs_of_manifest(manifests[0]), cards) if manifests else None


def estimate(needs: Needs, cards: Sequence[tuple[str, int]]) -> dict[str, Any] | None:
    """Bytes of weights, of a token and of a request, and tokens that fit.

    Args:
        cards: name and bytes of each kind of GPU.

    Returns:
        Plain JSON values, or `None` where the INT2 cache does not take such heads. Tokens are
        `None` where the size of the weights or what other layers keep is not known, and 0 where
        nothing is left for a cache.
    """
    try:
        bf16, _, int2 = caches(needs.geometry, needs.serving, Layout(), needs.other)
        kinds = [_card(needs, name, memory) for name, memory in cards]
    except ValueError:
        return None
    return {
        "estimate": True,
        "weights_bytes": needs.weights.nbytes if needs.weights else None,
        "weights_source": needs.weights.source if needs.weights else None,
        "int2_token_bytes": int2.token,
        "bf16_token_bytes": bf16.token,
        "window_bytes_per_request": int2.request,
        "state_bytes_per_request": int2.state,
        "other_layers_unknown": needs.unknown,
        "gpus": kinds,
    }


def _card(needs: Needs, name: str, memory: int) -> dict[str, Any]:
    """What fits on GPUs of one kind."""
    share = gpu_share(needs, memory, needs.weights.nbytes if needs.weights else 0, needs.gpus)
    requests, known = share.usual_requests, needs.weights is not None and needs.unknown is None
    facts = {"name": name, "memory_bytes": memory, "gpus": needs.gpus, "requests": requests}
    for kind in ("INT2", "BF16"):
        pools = share.pools(kind, requests) if known else None
        facts[f"{kind.lower()}_tokens"] = pools.tokens if pools else None
        facts[f"{kind.lower()}_requests"] = pools.requests if pools else None
    return facts


def _visible() -> list[tuple[str, int]]:
    """Every kind of GPU that programs see here."""
    return list(
        dict.fromkeys((card.name, card.memory) for card in hardware.visible(hardware.gpus()))
    )
