"""What a running server reports about its INT2 cache: artifact, recipe, bits per element, memory.
All values are plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oscar_kernels.spec import MIXED_QUANTIZER, QUANTIZER
from oscar_zoo.engines.sglang.layer_values import one_or_text
from oscar_zoo.engines.sglang.served_artifact import ServedArtifact
from oscar_zoo.engines.sglang.settings import PluginSettings
from oscar_zoo.runtime import memory_plan
from oscar_zoo.runtime.slot_store import SlotShape

KEY = "oscar_int2"
"""Key of the report in the state of a worker."""


def recipe(chosen: PluginSettings, slots: SlotShape) -> dict[str, Any]:
    """The serving recipe in force: windows in tokens, bits and clip ratios (as `layer_values`
    writes them where layers differ), and channels that share a scale."""
    return {
        "quantizer": QUANTIZER if chosen.bits.value.narrow else MIXED_QUANTIZER,
        "bits": str(chosen.bits.value),
        "sink": chosen.sink.value,
        "recent": chosen.recent.value,
        "k_clip": one_or_text(chosen.k_clip.value),
        "v_clip": one_or_text(chosen.v_clip.value),
        "group_size": max(slots.k.group_size, slots.v.group_size),
        "scale_dtype": slots.k.scale_dtype,
        "window_on_hit": chosen.window_on_hit.value,
    }


def describe(
    chosen: PluginSettings,
    artifact: ServedArtifact,
    slots: SlotShape,
    facts: Mapping[str, Any],
    *,
    tokens: int,
) -> dict[str, Any]:
    """The whole report of a worker.

    Args:
        slots: shape of the slots of this worker.
        facts: numbers that the hooks gave to SGLang: `plan`, `profiled`, `rows`, and of a hybrid
            model `states` or `sliding`.
        tokens: token slots of the pool.
    """
    plan = memory_plan.MemoryPlan(**facts["plan"])
    states = memory_plan.States(**facts.get("states", {}))
    sliding = memory_plan.Sliding(**facts.get("sliding", {}))
    return {
        "artifact": {
            "name": chosen.name,
            "digest": artifact.digest,
            "copy_digest": artifact.copy_digest,
            "id": None if artifact.manifest is None else artifact.manifest.id,
            "format_version": max(artifact.k.format_version, artifact.v.format_version),
            "transform": {"k": artifact.k.transform, "v": artifact.v.transform},
        },
        "recipe": recipe(chosen, slots),
        "origins": {
            name: getattr(chosen, name).origin
            for name in ("sink", "recent", "bits", "k_clip", "v_clip", "group_size")
        },
        "bits_per_element": memory_plan.bits_per_element(plan.slot, slots),
        "bits_per_element_in_all": memory_plan.bits_per_element(
            plan.slot + plan.fixed / tokens, slots
        ),
        "memory": {
            "token_slots": tokens,
            "slot_bytes": plan.slot,
            "window_bytes": plan.windows,
            "request_rows": facts["rows"],
            "transform_bytes": plan.transforms,
            "scratch_bytes": plan.scratch,
            "found_bytes": facts["profiled"],
            "state_slots": states.slots,
            "state_bytes": states.nbytes,
            "draft_state_bytes": states.draft_bytes,
            "sliding_slots": sliding.slots,
            "sliding_bytes": sliding.nbytes,
        },
    }
