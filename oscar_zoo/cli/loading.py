"""From command-line values to the arguments of the use cases that need torch; knows nothing of
printing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.app.devices import pick_device
from oscar_zoo.app.targets import parse_model
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.cli.options import parse_clip
from oscar_zoo.cli.render.progress import current
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.registry.model_names import ModelChoice, check_model_id, choose_model, serving_recipe

if TYPE_CHECKING:
    from oscar_zoo.compute.job import ComputeOptions
    from oscar_zoo.models.loading import LoadedModel

DEFAULT_CALIB_TOKENS = 16_384


def with_overrides(
    recipe: ServingRecipe, *, clip: str | None, group_size: int | None = None
) -> ServingRecipe:
    """`recipe` with what the user gave on the command line."""
    return recipe.override(clip=parse_clip(clip), group_size=group_size)


def compute_options(
    model: str,
    calib_data: str,
    clip: str | None,
    group_size: int | None,
    choices: Mapping[str, Any],
) -> ComputeOptions:
    """The options of `compute_artifact` from the command line; `choices` holds the options that
    pass through."""
    from oscar_zoo.compute.job import ComputeOptions
    from oscar_zoo.compute.options import COMPATIBLE
    from oscar_zoo.models.inspect import inspect_model

    choice = parse_model(model, current())
    choice.check_can_be_had("oscar-zoo compute FOLDER")
    revision = choices["revision"]
    if choices["model_id"] is not None:
        check_model_id(choices["model_id"])
    block = inspect_model(
        choice.source, revision=revision, model_id=choices["model_id"] or choice.model_id
    )
    recipe = serving_recipe(choice, block.geometry)
    device = pick_device(choices["device"], several=choices["engine"] == "transformers")
    calibration = choice.recipe.calibration if choice.recipe else None
    return ComputeOptions(
        model=choice.source,
        model_id=block.id,
        model_name=choice.name,
        revision=revision,
        calib_data=calib_data,
        calib_tokens=choices["calib_tokens"]
        or (calibration.tokens if calibration else DEFAULT_CALIB_TOKENS),
        seq_len=choices["seq_len"] or (calibration.sequence_length if calibration else None),
        recipe=with_overrides(recipe, clip=clip, group_size=group_size),
        method=COMPATIBLE if choices["compat"] else choices["method"],
        output_dir=choices["output_dir"],
        device=device,
        dtype=choices["dtype"],
        stream_weights=choices.get("stream_weights"),
        engine=choices["engine"],
        tensor_parallel=choices["tensor_parallel"],
        environment=_engine_environment(device) if choices["engine"] == "sglang" else {},
        force=choices["force"],
        resume=choices["resume"],
        seed=choices["seed"],
        chat_template=choices["chat_template"],
        allow_overlap=choices["allow_overlap"],
        allow_poor=choices["allow_poor"],
        fast=choices["fast"],
        tune=not choices.get("no_tune"),
        fixed_clip=clip is not None,
    )


def refused_by_serve(source: str, revision: str | None) -> UnsupportedModel | None:
    """Why `oscar-zoo serve` refuses this model, as far as its `config.json` tells; `None` when it
    does not.

    Raises:
        InvalidModel, PathNotFound, NetworkError: there is no readable configuration.
    """
    from oscar_zoo.engines.sglang.config_refusals import check_config
    from oscar_zoo.models.config_file import ConfigFile, read_config
    from oscar_zoo.models.inspect import config_folder

    try:
        check_config(ConfigFile(read_config(config_folder(source, revision=revision))))
    except UnsupportedModel as error:
        return error
    return None


def will_be_refused(error: UnsupportedModel) -> str:
    """What to say before time is spent on a model that `serve` refuses with `error`."""
    return f"oscar-zoo serve will refuse this model: {error.message}"


def refit_options(
    moments: Path, clip: str | None, group_size: int | None
) -> tuple[str, ServingRecipe]:
    """Name of the model's folder in hubs, and the serving recipe, for a moments file; raises as
    `load_moments`."""
    from oscar_zoo.compute.moments_file import load_moments

    block = load_moments(moments)[1].model
    choice = choose_model(block.id)
    return choice.name, with_overrides(
        serving_recipe(choice, block.geometry), clip=clip, group_size=group_size
    )


def _engine_environment(device: str) -> dict[str, str]:
    """Of an SGLang engine that calibrates: as for `serve`, with the tap instead of a cache."""
    from oscar_zoo.engines.sglang.launch.plan import child_environment
    from oscar_zoo.engines.sglang.launch.staging import kernels_folder

    return child_environment(
        os.environ, device="cpu" if device == "cpu" else None, kernels=kernels_folder()
    )


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
