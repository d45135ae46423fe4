"""From command-line values to the arguments of what loads a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oscar_zoo.app.devices import pick_device
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.cli.options import parse_clip
from oscar_zoo.registry.model_names import ModelChoice

if TYPE_CHECKING:
    from oscar_zoo.models.loading import LoadedModel


def with_overrides(recipe: ServingRecipe, *, clip: str | None) -> ServingRecipe:
    """`recipe` with what the user gave on the command line."""
    return recipe.override(clip=parse_clip(clip))


def load_for(choice: ModelChoice, choices: Mapping[str, Any], *, longest: int) -> LoadedModel:
    """Load the model of `choice`, as the options of a command say, for sequences of up to `longest`
    tokens."""
    from oscar_zoo.models.loading import load_model
    from oscar_zoo.models.memory import Workload

    return load_model(
        choice.source,
        revision=choices["revision"],
        dtype=choices["dtype"],
        device=pick_device(choices["device"], several=True),
        model_id=choice.model_id,
        stream=choices["stream_weights"],
        workload=Workload(longest),
    )
