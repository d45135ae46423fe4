"""Checkpoint folders of the small models of `capture_models`, as they come in practice: in shards,
or in float8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from capture_models import build
from random_qwen3 import EXAMPLE, TOKENIZER
from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


def save_model(
    folder: Path,
    family: str = "Qwen3",
    *,
    shard: str = "5GB",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Write weights and the example's tokenizer; files of at most about `shard`."""
    build(family, dtype, **changes).model.save_pretrained(folder, max_shard_size=shard)
    for name in TOKENIZER:
        shutil.copyfile(EXAMPLE / name, folder / name)
    return folder


def quantize_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """float8 weight, its scales `[blocks, blocks]`, and the bfloat16 weights they stand for; block
    after block."""
    stored, exact = (
        torch.empty_like(weight, dtype=torch.float8_e4m3fn),
        torch.empty_like(weight, dtype=torch.bfloat16),
    )
    rows, columns = (range(0, size, step) for size, step in zip(weight.shape, block, strict=True))
    scales = torch.empty(len(rows), len(columns))
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            at = slice(top, top + block[0]), slice(left, left + block[1])
            scales[i, j] = weight[at].float().abs().max() / 448
            stored[at] = (weight[at].float() / scales[i, j]).to(stored.dtype)
            exact[at] = (stored[at].float() * scales[i, j]).to(exact.dtype)
    return stored, scales, exact


def float8_pair(
    source: Path, folder: Path, block: tuple[int, int] = (128, 128)
) -> tuple[Path, Path]:
    """A checkpoint with float8 projections, and one with the bfloat16 weights that it stands
    for."""
    quantized, plain = (
        shutil.copytree(source, folder / "float8"),
        shutil.copytree(source, folder / "plain"),
    )
    small: dict[str, Tensor] = {}
    exact = load_file(source / "model.safetensors")
    for name, weight in exact.items():
        small[name] = weight
        if name.endswith("_proj.weight"):
            small[name], small[f"{name}_scale_inv"], exact[name] = quantize_blocks(weight, block)
    save_file(small, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    change_config(
        quantized, quantization_config={"quant_method": "fp8", "weight_block_size": list(block)}
    )
    return quantized, plain


def change_config(folder: Path, *, part: str | None = None, **changes: object) -> None:
    """Set entries of `config.json`, or of one of its parts."""
    config = json.loads((folder / "config.json").read_bytes())
    (config[part] if part else config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
