"""From command-line values to the arguments of the use cases that need torch; knows nothing of printing."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.cli.models import ModelChoice, check_model_id, choose_model, serving_recipe
from oscar_zoo.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from oscar_zoo.compute.job import ComputeOptions
    from oscar_zoo.evaluate.models import LoadedModel

DEFAULT_CALIB_TOKENS = 16_384


def require_compute() -> None:
    """Raise `MissingDependency` when torch or transformers is not installed; imports neither."""
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependency.for_extra(library, "compute")


def require_serve() -> None:
    """Raise `MissingDependency` when torch or sglang is not installed; imports neither."""
    for library in ("torch", "sglang"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependency.for_extra(library, "serve")


def parse_clip(text: str) -> Clip:
    """`K,V` as two ratios; raises `UsageError`."""
    try:
        k, v = (float(part) for part in text.split(","))
        return Clip(k=k, v=v)
    except ValueError:
        raise UsageError(
            f"--clip {text!r} is not two ratios between 0 and 1.", hint="for example --clip 0.96,0.92; 0 turns it off"
        ) from None


def pick_device(wanted: str | None) -> str:
    """The device to run on: what was asked for, else the first GPU, else the CPU; raises `UsageError`."""
    from oscar_zoo.evaluate.device import check_device, default_device

    if wanted is None:
        return default_device()
    check_device(wanted)
    return wanted


def with_overrides(recipe: ServingRecipe, *, clip: str | None, group_size: int | None = None) -> ServingRecipe:
    """`recipe` with what the user gave on the command line."""
    changes: dict[str, Any] = {}
    if clip is not None:
        changes["clip"] = parse_clip(clip)
    if group_size is not None:
        changes["group_size"] = group_size
    return ServingRecipe(**(recipe.model_dump() | changes)) if changes else recipe


def compute_options(
    model: str, calib_data: str, clip: str | None, group_size: int | None, choices: Mapping[str, Any]
) -> ComputeOptions:
    """The options of `compute_artifact` from the command line; `choices` holds the options that pass through."""
    from oscar_zoo.compute.job import ComputeOptions
    from oscar_zoo.evaluate.models import inspect_model
    from oscar_zoo.evaluate.texts import text_path

    choice = choose_model(model)
    revision = choices["revision"]
    if choices["model_id"] is not None:
        check_model_id(choices["model_id"])
    block = inspect_model(choice.source, revision=revision, model_id=choices["model_id"] or choice.model_id)
    recipe = serving_recipe(choice, block.geometry)
    calibration = choice.recipe.calibration if choice.recipe else None
    return ComputeOptions(
        model=choice.source,
        model_id=block.id,
        model_name=choice.name,
        revision=revision,
        calib_data=text_path(calib_data, "calibration"),
        calib_tokens=choices["calib_tokens"] or (calibration.tokens if calibration else DEFAULT_CALIB_TOKENS),
        seq_len=choices["seq_len"] or (calibration.sequence_length if calibration else None),
        recipe=with_overrides(recipe, clip=clip, group_size=group_size),
        method=choices["method"],
        output_dir=choices["output_dir"],
        device=pick_device(choices["device"]),
        dtype=choices["dtype"],
        force=choices["force"],
    )


def load_for(choice: ModelChoice, *, device: str | None, dtype: Any, revision: str | None = None) -> LoadedModel:
    """Load the model of `choice`."""
    from oscar_zoo.evaluate.models import load_model

    return load_model(
        choice.source, revision=revision, dtype=dtype, device=pick_device(device), model_id=choice.model_id
    )
