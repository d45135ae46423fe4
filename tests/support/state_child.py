"""The states of models, as SGLang's own configurations size them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

CLASSES = {
    "falcon_h1": ("falcon_h1", "FalconH1Config"),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridConfig"),
    "lfm2": ("lfm2", "Lfm2Config"),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeConfig"),
    "nemotron_h": ("nemotron_h", "NemotronHConfig"),
    "qwen3_5": ("qwen3_5", "Qwen3_5TextConfig"),
    "qwen3_5_moe": ("qwen3_5", "Qwen3_5MoeTextConfig"),
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig"),
}
"""By model type: module in `sglang.srt.configs`, and class."""


def state_bytes(configs: dict[str, dict[str, Any]], out: str) -> None:
    """Of every configuration: bytes of the states of one slot on one GPU, and layers that have one;
    JSON in the file `out`."""
    from sglang.srt import runtime_context

    one: dict[str, Any] = {"attn_tp_size": 1}
    if hasattr(runtime_context, "linear_attn_tp_size"):  # SGLang 0.5.23 and later
        one["enable_cp_tp_group_sharing"] = False
    found: dict[str, list[int]] = {}
    with runtime_context.get_parallel().override(**one):
        for name, values in configs.items():
            module, kind = CLASSES[values["model_type"]]
            made = getattr(importlib.import_module(f"sglang.srt.configs.{module}"), kind)
            given = {key: value for key, value in values.items() if key != "model_type"}
            states = made(**given).mamba2_cache_params
            found[name] = [int(states.mamba_cache_per_req), len(states.layers)]
    Path(out).write_text(json.dumps(found))
