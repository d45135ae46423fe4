"""The full-attention layers of models, as the plugin finds them in SGLang's configuration."""

from __future__ import annotations

import json
from pathlib import Path


def full_layers(folders: dict[str, str], out: str) -> None:
    """Of every folder with a `config.json`: layers, KV heads, head_dim of K and of V; JSON in the
    file `out`. A model that is refused has a sentence."""
    from sglang.srt.configs.model_config import ModelConfig

    from oscar_zoo.engines.sglang import refusals
    from oscar_zoo.engines.sglang.compat import geometry
    from oscar_zoo.errors import OscarZooError

    found: dict[str, object] = {}
    for name, folder in folders.items():
        model = ModelConfig(model_path=folder)
        try:
            refusals.check_model(model)
        except OscarZooError as error:
            found[name] = error.message
            continue
        heads = model.get_total_num_kv_heads()
        layers = list(geometry.full_layers(model))
        found[name] = [layers, heads, model.head_dim, model.v_head_dim]
    Path(out).write_text(json.dumps(found))
