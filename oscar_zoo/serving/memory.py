"""What a model needs on GPUs, from what is on this machine: its folder, its `config.json` in the
cache of the hub's client, or its recipe. No hub is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.names import is_path
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.engines.sglang.capacity import BF16_BYTES, USABLE, Planner, caches, room
from oscar_zoo.engines.sglang.sizing import Layout, usual_requests
from oscar_zoo.models import hardware
from oscar_zoo.models.config_file import ConfigFile, geometry_of_folder
from oscar_zoo.models.geometry import quantization
from oscar_zoo.models.model_hub import kept_config
from oscar_zoo.models.other_layers import OtherLayers, other_layers
from oscar_zoo.models.weight_count import weights_of_config, weights_of_name
from oscar_zoo.models.weight_files import stored_weights
from oscar_zoo.registry.recipe import (
    ModelRecipe,
    config_of_recipe,
    others_of_recipe,
    serving_recipe,
)
from oscar_zoo.registry.targets import ModelChoice, holds_model


@dataclass(frozen=True)
class Weights:
    nbytes: int
    source: str


@dataclass(frozen=True)
class Needs:
    """A model as a planner of memory sees it; what is `None` nobody knows."""

    geometry: Geometry  # of its layers with full attention
    serving: ServingRecipe
    weights: Weights | None
    other: OtherLayers | None  # what its other layers keep
    longest: int | None = None  # tokens of a request at most
    gpus: int = 1  # how many to start from
    # Id of the model on Hugging Face whose `config.json` says more, unless it was read.
    config_of: str | None = None

    @property
    def unknown(self) -> str | None:
        """What nobody knows of its other layers, in words; `None` where all is known."""
        if self.other is None:
            return "the memory of the layers without full attention"
        if self.other.known:
            return None
        states = self.other.state is None
        return f"the {'size of the states' if states else 'length of the sliding windows'}"


def needs_of_choice(choice: ModelChoice) -> Needs | None:
    """The needs of a model; `None` where neither its shapes nor its `config.json` are here."""
    folder = Path(choice.source)
    local = folder if is_path(choice.source) or holds_model(folder) else kept_config(choice.source)
    recipe = choice.recipe
    if local is None:
        return None if recipe is None else needs_of_recipe(recipe)
    config = ConfigFile.of_folder(local)
    geometry = geometry_of_folder(local, choice.model_id, config)
    stored, _ = stored_weights(local, config)
    counted = weights_of_config(config)
    weights = Weights(stored, "size of its files") if stored and local == folder else None
    if weights is None and counted is not None:
        weights = Weights(counted, "counted from its config.json")
    if weights is None and not quantization(config):  # a name says nothing of another format
        weights = _by_name(choice.name)
    return Needs(
        geometry=geometry,
        serving=serving_recipe(recipe, geometry),
        weights=weights,
        other=other_layers(config, geometry.attention_layers),
        longest=_longest(config),
        gpus=recipe.tensor_parallel if recipe else 1,
    )


def needs_of_recipe(recipe: ModelRecipe) -> Needs:
    config = config_of_recipe(recipe)
    return Needs(
        geometry=recipe.geometry,
        serving=recipe.serving,
        weights=_weights_of_recipe(recipe, config),
        other=others_of_recipe(recipe),
        longest=recipe.weights.max_position if recipe.weights else _longest(config),
        gpus=recipe.tensor_parallel,
        config_of=recipe.hf_id if recipe.on_hub else None,
    )


def needs_of_manifest(manifest: Manifest) -> Needs:
    geometry = manifest.model.geometry
    every = len(geometry.attention_layers) == geometry.num_layers
    return Needs(
        geometry=geometry,
        serving=manifest.recipe,
        weights=_by_name(manifest.artifact_id.model),
        other=OtherLayers() if every else None,
        longest=longest_of_manifest(manifest),
    )


def longest_of_manifest(manifest: Manifest) -> int | None:
    return manifest.model.rope.max_position if manifest.model.rope else None


def _weights_of_recipe(recipe: ModelRecipe, config: ConfigFile) -> Weights | None:
    """The larger of what its shapes and its name say: shapes leave out towers for images."""
    if recipe.parameters is not None:
        return Weights(BF16_BYTES * recipe.parameters, "its shapes, in BF16")
    counted = weights_of_config(config)
    of_shapes = None if counted is None else Weights(counted, "counted from its recipe")
    found = filter(None, (of_shapes, _by_name(recipe.name)))
    return max(found, key=lambda one: one.nbytes, default=None)


def _longest(config: ConfigFile) -> int | None:
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _by_name(name: str) -> Weights | None:
    nbytes = weights_of_name(name)
    return None if nbytes is None else Weights(nbytes, "about, by the size in its name")


def fetch_config(hub_id: str) -> str:
    return f"get its config.json: hf download {hub_id} config.json"


def gpu_share(
    needs: Needs, memory: int, weights: int, gpus: int, usable: float = USABLE
) -> tuple[int, int, tuple[Planner, ...]]:
    """What each of `gpus` GPUs of `memory` bytes has, beside its share of the `weights` of the
    whole model in bytes: bytes for a cache, as many requests as `serve` lets run when its flags do
    not say a number, and planners of the caches BF16, FP8 and INT2, for which what nobody knows of
    other layers counts as much as it can be."""
    layout, windows = Layout(tp=gpus), needs.serving.windows
    kinds = caches(needs.geometry, needs.serving, layout, needs.other)
    plain = kinds[0].token
    planners = tuple(Planner(kind, plain, windows, needs.other, least=True) for kind in kinds)
    left = room(memory, weights, layout, usable)
    return left, usual_requests(memory, plain, windows, layout), planners


def estimate_memory(
    recipe: ModelRecipe | None,
    manifests: Sequence[Manifest],
    gpu_memory: int | None = None,
    choice: ModelChoice | None = None,
) -> dict[str, Any] | None:
    """What `info` says that a model needs, and what fits on each kind of GPU that is visible, or on
    one of `gpu_memory` bytes, for as many requests as `serve` lets run; `None` where no shapes are
    known: those of the zoo, of the first of `manifests`, or of `choice`. The recipe is that of all
    artifacts, where they have one."""
    seen = hardware.visible(hardware.gpus()) if gpu_memory is None else ()
    kinds = dict.fromkeys((card.name, card.memory) for card in seen)
    cards = [*kinds] if gpu_memory is None else [("GPU", gpu_memory)]
    if recipe is not None:
        needs = needs_of_recipe(recipe)
        alike = manifests and all(one.recipe == manifests[0].recipe for one in manifests)
        return estimate(replace(needs, serving=manifests[0].recipe) if alike else needs, cards)
    known = needs_of_manifest(manifests[0]) if manifests else choice and needs_of_choice(choice)
    return estimate(known, cards) if known else None


def estimate(needs: Needs, cards: Sequence[tuple[str, int]]) -> dict[str, Any] | None:
    """Bytes of weights, of a token and of a request, and tokens that fit on `cards`, each a name
    and bytes, as JSON values; `None` where the INT2 cache does not take such heads. Tokens are
    `None` where the weights or what other layers keep is not known, and 0 where nothing is left."""
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
    weights = needs.weights.nbytes if needs.weights else 0
    left, requests, planners = gpu_share(needs, memory, weights, needs.gpus)
    known = needs.weights is not None and needs.unknown is None
    facts = {"name": name, "memory_bytes": memory, "gpus": needs.gpus, "requests": requests}
    for planner in (planners[2], planners[0]):
        pools = planner.divide(left, requests) if known else None
        kind = planner.cache.kind.lower()
        facts[f"{kind}_tokens"] = pools.tokens if pools else None
        facts[f"{kind}_requests"] = pools.requests if pools else None
    return facts
