"""A model recipe: what people know about one model, from one TOML file of `zoo/`.

A recipe names the model on each hub, its KV-cache geometry and the serving and calibration settings
to start from. Every fact has an entry in `sources`; a fact nobody could confirm says so there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from oscar_kernels.spec import check_group_size
from oscar_zoo.artifact.names import check_part
from oscar_zoo.artifact.specs import (
    Clip,
    Count,
    Geometry,
    ServingRecipe,
    Spec,
    Text,
    largest_group,
    validated,
)
from oscar_zoo.errors import MalformedFile

if TYPE_CHECKING:  # they need numpy, and the completion of a name does not
    from oscar_zoo.models.config_file import ConfigFile
    from oscar_zoo.models.other_layers import OtherLayers

DEFAULT_GROUP = 128
"""Channels that share a scale, for a model that is not in the zoo and has rows of this multiple."""
RepoId = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
]


class CalibrationDefaults(Spec):
    """How much text `compute` reads when nobody says otherwise."""

    sequences: Count
    sequence_length: Count
    seed: Annotated[int, Field(ge=0)] = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length


class DraftDefaults(Spec):
    """Drafts from `layers` of the model's own that guess later tokens (MTP): `steps` in front of
    every step, which verifies them and one more, 32 at most."""

    layers: Count
    steps: Annotated[int, Field(ge=1, le=31)]


class WeightShapes(Spec):
    """Shapes beside the KV cache's, enough to build a dense model of `family` with random weights
    for benchmarks."""

    family: Literal["qwen3"]
    hidden_size: Count
    intermediate_size: Count
    vocab_size: Count
    max_position: Count
    tied_embeddings: bool


ConfigValue = bool | int | float | Text | tuple[Text, ...] | dict[str, Text]


class ModelRecipe(Spec):
    """One model of the zoo.

    `name` is the folder of its artifacts in every hub: the model's name without organisation.
    `family` is what people call its kind, and `model_type` what its `config.json` calls it.
    `default_tag` is the calibration tag a bare name means, when there is one. `on_hub` is false
    where no hub has the checkpoint: its ids are names only, and commands need its folder.
    `tensor_parallel` is the number of GPUs to start from. `drafts` is there where the checkpoint
    has layers for speculative decoding. `config` are values of `config.json` under their own names,
    beside the geometry: those that say what its other layers keep, or how large its weights are."""

    name: Text
    hf_id: RepoId
    family: Text
    model_type: Text
    modelscope_id: RepoId | None = None
    on_hub: bool = True
    aliases: tuple[Text, ...] = ()
    default_tag: Text | None = None
    tensor_parallel: Count = 1
    geometry: Geometry
    serving: ServingRecipe
    calibration: CalibrationDefaults
    weights: WeightShapes | None = None
    drafts: DraftDefaults | None = None
    config: dict[Text, ConfigValue] = Field(default_factory=dict)
    sources: dict[str, Text]

    @model_validator(mode="after")
    def _consistent(self) -> ModelRecipe:
        for text in filter(None, (self.name, *self.aliases, self.default_tag)):
            check_part(text)  # raises a ValueError, as validators do
        check_group_size(self.geometry.head_dims, self.serving.group_size)
        if self.geometry.num_q_heads % self.tensor_parallel:
            raise ValueError(f"tensor_parallel {self.tensor_parallel} does not divide num_q_heads")
        for name in ("drafts", "config"):
            if getattr(self, name) and name not in self.sources:
                raise ValueError(f"{name} has no entry in sources")
        return self

    @property
    def parameters(self) -> int | None:
        """Numbers in the matrices of the model, where the zoo knows all shapes."""
        shapes, cache = self.weights, self.geometry
        if shapes is None:
            return None
        queries = cache.num_q_heads * (cache.head_dim + cache.v_head_dim)
        keys = cache.num_kv_heads * (cache.head_dim + cache.v_head_dim)
        layer = shapes.hidden_size * (queries + keys + 3 * shapes.intermediate_size)
        embeddings = shapes.vocab_size * shapes.hidden_size * (1 if shapes.tied_embeddings else 2)
        return cache.num_layers * layer + embeddings

    @property
    def names(self) -> tuple[str, ...]:
        ids = (self.hf_id, *([self.modelscope_id] if self.modelscope_id else []))
        return (self.name, *ids, *self.aliases)


def serving_recipe(known: ModelRecipe | None, geometry: Geometry) -> ServingRecipe:
    """The recipe to calibrate and serve a model with: that of `known`, what the zoo knows of it,
    when its geometry fits, else the default."""
    if known is not None and known.geometry == geometry:
        return known.serving
    largest = largest_group(geometry.head_dims)
    group = DEFAULT_GROUP if largest % DEFAULT_GROUP == 0 else largest
    if geometry.rotary_key:
        return ServingRecipe(group_size=group, clip=Clip(k=0, v=0, algorithm="none"))
    return ServingRecipe(group_size=group, clip=Clip(k=0.96, v=0.92))


def load_recipe(text: str, *, what: str = "recipe") -> ModelRecipe:
    """Parse one TOML recipe, whose `attention_layers` may be `"all"`, `{ every = n, from = first }`
    or a list."""
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MalformedFile("recipe.syntax", f"{what} is not TOML: {error}.") from None
    geometry = value.get("geometry")
    if isinstance(geometry, dict):
        value["geometry"] = _expand(geometry, what)
    return validated(ModelRecipe, value, code="recipe.schema", what=what)


def _expand(geometry: Mapping[str, Any], what: str) -> dict[str, Any]:
    full = dict(geometry)
    if "head_dim" in full:
        full.setdefault("v_head_dim", full["head_dim"])
    layers, count = full.get("attention_layers"), full.get("num_layers")
    if type(count) is not int:
        return full
    if layers == "all":
        full["attention_layers"] = list(range(count))
    elif isinstance(layers, dict):
        every, first = layers.get("every"), layers.get("from", 0)
        is_known = not set(layers) - {"every", "from"}
        if not is_known or type(every) is not int or type(first) is not int or every < 1:
            raise MalformedFile(
                "recipe.schema", f"{what}: attention_layers wants {{ every = n, from = first }}."
            )
        full["attention_layers"] = list(range(first, count, every))
    return full


_WINDOW = "sliding_window"
_OTHER = "linear_attention"
"""Stands for every kind of layer that keeps a state."""
_KINDS = ("hybrid_override_pattern", "layers_block_type")
"""Where a file says the kind of every layer in words of its own."""
_CHUNKED = ("llama4",)
"""Model types whose other layers keep tokens of chunks, which no server of ours has."""


def config_of_recipe(recipe: ModelRecipe) -> ConfigFile:
    """A `config.json` with what the recipe knows, for code that reads a file."""
    from oscar_zoo.models.config_file import ConfigFile
    from oscar_zoo.models.geometry import FULL_ATTENTION, SLIDING_ATTENTION
    from oscar_zoo.models.other_layers import kept_by_others

    shape = recipe.geometry
    windows = kept_by_others(recipe, shape) == "windows"
    other = SLIDING_ATTENTION if windows else _OTHER
    values: dict[str, object] = {
        "model_type": recipe.model_type,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_q_heads,
    }
    if shape.rotary_key is None:
        values |= {"num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    if shape.v_head_dim != shape.head_dim:
        values["v_head_dim"] = shape.v_head_dim
    if not any(name in recipe.config for name in _KINDS):
        values["layer_types"] = [
            FULL_ATTENTION if layer in shape.attention_layers else other
            for layer in range(shape.num_layers)
        ]
    return ConfigFile({**values, **recipe.config})


def others_of_recipe(recipe: ModelRecipe) -> OtherLayers | None:
    """What the layers without full attention keep, as far as the recipe tells."""
    from oscar_zoo.models.config_file import ConfigFile
    from oscar_zoo.models.other_layers import OtherLayers, kept_by_others, other_layers

    if recipe.model_type in _CHUNKED:
        return None
    values, kept = config_of_recipe(recipe).as_written, kept_by_others(recipe, recipe.geometry)
    is_open = kept == "windows" and _WINDOW not in values
    # How many tokens a window has does not change what one token takes.
    config = ConfigFile({**values, _WINDOW: 1} if is_open else values)
    found = other_layers(config, recipe.geometry.attention_layers)
    if found is None:
        return OtherLayers(state=None) if kept == "states" else None
    return replace(found, window=None) if is_open else found
