"""A small Qwen3-MoE with random weights, as a checkpoint folder. Its shape fits the INT2 kernels of
a GPU."""

import shutil
from pathlib import Path
from typing import Any

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_model(folder: Path, example: Path) -> Path:
    """Write bfloat16 weights: 3 layers, 8 experts, 4 query and 2 KV heads of 64, the tokenizer of
    `example`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copyfile(example / name, folder / name)
    return folder
