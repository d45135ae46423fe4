"""What one worker process serves: settings and artifact read once, and the shapes that follow from
them and the model.

Budget and allocation both ask here, so that they cannot disagree.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

from oscar_kernels.spec import QuantSpec
from oscar_zoo.engines.sglang import refusals, served_artifact, settings
from oscar_zoo.engines.sglang.compat import geometry, server_arguments
from oscar_zoo.errors import UsageError
from oscar_zoo.runtime.sink_blocks import SinkBlocks
from oscar_zoo.runtime.slot_store import SlotShape
from oscar_zoo.runtime.transforms import transform_bytes
from oscar_zoo.runtime.window_store import WindowShape


@functools.cache
def served() -> tuple[settings.PluginSettings, served_artifact.ServedArtifact]:
    """Settings and artifact of this process, read once.

    Raises:
        OscarZooError: anything wrong with either.
    """
    given = settings.read_settings(os.environ)
    artifact = served_artifact.load(
        given.source.value, given.expected_digest, model=os.environ.get(settings.MODEL)
    )
    final = settings.read_settings(os.environ, artifact.recipe)
    return replace(final, warnings=final.warnings + artifact.warnings), artifact


def runs_kernels(device: str, chosen: settings.PluginSettings) -> bool:
    """Whether attention runs on the GPU kernels; test modes and CPUs have the plain executor."""
    knobs = chosen.knobs
    return (
        (device.startswith("cuda") or knobs.executor == "kernels")
        and knobs.mode == "int2"
        and not knobs.mutant
    )


def eager_only(server_args: Any) -> bool:
    """Whether the executor in force cannot be captured in a CUDA graph; reads the settings anew,
    keeps nothing."""
    return not runs_kernels(
        str(server_arguments.resolved(server_args).device), settings.read_settings(os.environ)
    )


def scratch_bytes(owner: Any, device: str, slots: SlotShape, side: WindowShape) -> int:
    """What the executor in force allocates beside pool and transforms.

    Args:
        owner: SGLang's model runner or memory configurator.
        device: of the worker.
        slots, side: of the worker.
    """
    if not runs_kernels(device, served()[0]):
        return 0
    from oscar_zoo.engines.sglang.device_path import DevicePath

    heads, longest = geometry.local_q_heads(owner.model_config), geometry.longest_request(owner)
    whole = DevicePath.nbytes(slots, side, num_q_heads=heads, max_tokens=longest, device=device)
    if device.startswith(
        "cuda"
    ):  # what the write kernel keeps of the transforms, see `dispatch.prepare`
        artifact = served()[1]
        whole += transform_bytes(artifact.k, artifact.v, slots.num_layers, slots.num_kv_heads)
    return whole


def check_model(model_config: Any) -> None:
    """Refuse a model by its configuration or because the artifact is not for it.

    Raises:
        UnsupportedModel, GeometryMismatch: see `refusals` and `loading`.
    """
    refusals.check_model(model_config, linear_layers=geometry.has_linear_layers(model_config))
    served()[1].check_geometry(
        num_layers=model_config.num_hidden_layers,
        num_kv_heads=model_config.get_total_num_kv_heads(),
        head_dim=model_config.head_dim,
        v_head_dim=model_config.v_head_dim,
    )


def sink_blocks(shape: WindowShape) -> SinkBlocks:
    """Who gets which sink block of a store of this shape."""
    chosen = served()[0]
    recent = shape.recent if chosen.window_on_hit.value == "recompute" else None
    early = chosen.knobs.mutant == "publish_early"
    return SinkBlocks(shape.sink, shape.num_blocks, recent, publish_early=early)


def slot_shape(configurator: Any, *, num_slots: int) -> SlotShape:
    """Shape of the slots of this worker.

    Raises:
        UsageError: head size and group size do not fit.
    """
    chosen, model = served()[0], configurator.model_config
    specs = []
    for dim, clip in (
        (model.head_dim, chosen.k_clip.value),
        (model.v_head_dim, chosen.v_clip.value),
    ):
        try:
            specs.append(QuantSpec(dim, chosen.group_size.value or dim, clip))
        except ValueError as error:
            raise UsageError(
                f"INT2 rows of this model: {error}.", hint="--oscar-group-size"
            ) from None
    layers = configurator.layer_info.num_effective_layers
    return SlotShape(layers, num_slots, len(geometry.local_kv_heads(model)), specs[0], specs[1])


def side_shape(configurator: Any, *, num_rows: int) -> WindowShape:
    """Shape of the rings and sinks of this worker."""
    chosen, model = served()[0], configurator.model_config
    idle = chosen.idle_sinks.value
    return WindowShape(
        num_layers=configurator.layer_info.num_effective_layers,
        num_rows=num_rows,
        num_kv_heads=len(geometry.local_kv_heads(model)),
        k_head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        sink=chosen.sink.value,
        recent=chosen.recent.value,
        dtype=configurator.model_dtype,
        idle=0 if chosen.sink.value == 0 else num_rows - 1 if idle is None else idle,
    )
