"""An artifact has the layers that a server wants, for every family of hybrid models.

`compute` finds the full-attention layers in the configuration of transformers, and a worker in that
of SGLang. Both must name the same ones, on every release.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import RELEASES, Engines, needs_sglang

from oscar_zoo.models.geometry import model_block

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
LINEAR: dict[str, Any] = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1}
EVERY_SECOND = {"full_attention_interval": 2}
"""In the published files of these models; transformers does not write it again."""
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", LINEAR, EVERY_SECOND),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", LINEAR, EVERY_SECOND),
    "Lfm2ForCausalLM": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}, {}),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybridConfig",
        {"layer_types": ["mamba", "attention"] * 2, "mamba_d_state": 16, **MAMBA},
        {},
    ),
    "FalconH1ForCausalLM": (
        "FalconH1Config",
        {"head_dim": 64, "mamba_d_ssm": 512, "mamba_d_state": 16, **MAMBA},
        {},
    ),
    "NemotronHForCausalLM": (
        "NemotronHConfig",
        {
            "head_dim": 64,
            "layers_block_type": ["mamba", "attention"] * 2,
            "hybrid_override_pattern": "M*M*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 16,
        },
        {},
    ),
}
"""By architecture: class of the configuration, its values, and what published files say besides."""


def write_config(folder: Path, architecture: str) -> list[Any]:
    """A model's folder without weights; returns what `compute` makes of it."""
    import transformers

    name, values, published = FAMILIES[architecture]
    config = getattr(transformers, name)(**{**COMMON, **values})
    config.architectures = [architecture]
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | published))
    block = model_block(config, model_id=architecture, revision=None, config_sha256="0" * 64)
    return [list(block.attention_layers), block.num_kv_heads, block.head_dim, block.v_head_dim]


@pytest.mark.parametrize("release", RELEASES)
def test_compute_and_server_name_the_same_layers(release: str, tmp_path: Path) -> None:
    wanted = {name: write_config(tmp_path / name, name) for name in FAMILIES}
    runs = Engines(tmp_path, release)
    try:
        found = runs.call(
            "engine_calls:full_layers", folders={name: str(tmp_path / name) for name in FAMILIES}
        )
    finally:
        runs.close()
    assert found == wanted
    assert {name: layers for name, (layers, *_) in found.items()} == {
        name: [0, 1, 2, 3] if name == "FalconH1ForCausalLM" else [1, 3] for name in FAMILIES
    }
