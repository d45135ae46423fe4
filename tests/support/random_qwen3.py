"""A Qwen3 model with random weights, two layers and grouped queries, as a checkpoint folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_model(
    folder: Path, *, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 16
) -> Path:
    """Write float32 weights of a model with context 256 and the example's tokenizer; returns
    `folder`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copyfile(EXAMPLE / name, folder / name)
    return folder
