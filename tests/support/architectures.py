"""A small random model of every architecture that people serve, as checkpoint folders.

They have four layers, mostly 64 channels per head, two KV heads for four query heads, and the
values in which their configuration class differs from others. Weights are random, so perplexities
say nothing; tokens can be compared with those of transformers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from architecture_rows import ARCHITECTURES
from random_qwen3 import EXAMPLE, TOKENIZER
from safetensors.torch import load_file, save_file
from saved_models import change_config

__all__ = [
    "ARCHITECTURES",
    "shorten_chunks",
    "write_architecture",
    "write_config",
    "write_mtp_model",
]


def write_config(name: str, folder: Path) -> Path:
    """`config.json` alone, for what is decided before weights are read."""
    ARCHITECTURES[name].configuration().save_pretrained(folder)
    return folder


def write_architecture(name: str, folder: Path, *, dtype: str | None = None) -> Path:
    """A checkpoint with the example's tokenizer.

    Biases, norms and sinks are moved away from their trivial values.

    Args:
        dtype: of the stored weights, in place of the architecture's.
    """
    import transformers

    from oscar_zoo.models.model_class import outline

    tiny = ARCHITECTURES[name]
    torch.manual_seed(1)
    model = outline(tiny.configuration(), name).float()
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim == 1:
                _spread(path, weight, draw)
        if tiny.config.startswith(("Gemma3", "Gemma4")):
            _louder_layers(model)
        if tiny.config.startswith("Gemma4"):
            _own_factors(model)
    model.to(getattr(torch, dtype or tiny.dtype)).save_pretrained(folder)
    if tiny.stored:
        file = folder / "model.safetensors"
        weights = dict(tiny.stored(name, weight) for name, weight in load_file(file).items())
        save_file(weights, file, metadata={"format": "pt"})
    if tiny.hub_class:
        change_config(folder, architectures=[tiny.hub_class])
    for part, values in tiny.unsaved.items():
        change_config(folder, part=part, **values)
    for file in TOKENIZER:
        shutil.copyfile(EXAMPLE / file, folder / file)
    for processor in tiny.processors:
        getattr(transformers, processor)().save_pretrained(folder)
    return folder


def write_mtp_model(folder: Path) -> Path:
    """A GLM-4.5 with a layer for the next token but one, which transformers leaves out: a copy of
    the last layer, behind a projection of the last token and its hidden state."""
    write_architecture("glm4_moe", folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    count = ARCHITECTURES["glm4_moe"].configuration().num_hidden_layers
    last, own = f"model.layers.{count - 1}.", f"model.layers.{count}."
    weights |= {
        own + name.removeprefix(last): weight.clone()
        for name, weight in weights.items()
        if name.startswith(last)
    }
    hidden = weights["model.norm.weight"]
    draw = torch.Generator().manual_seed(11)
    projection = torch.randn(len(hidden), 2 * len(hidden), generator=draw) * 0.1
    weights[own + "eh_proj.weight"] = projection.to(hidden.dtype)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{own}{norm}.weight"] = hidden.clone()
    for name in ("embed_tokens", "shared_head.head"):
        source = "lm_head.weight" if name == "shared_head.head" else "model.embed_tokens.weight"
        weights[f"{own}{name}.weight"] = weights[source].clone()
    save_file(weights, file, metadata={"format": "pt"})
    change_config(folder, num_nextn_predict_layers=1)
    return folder


def shorten_chunks(folder: Path) -> Path:
    """Let Mamba layers compute chunks of 32 tokens, with which the sums stay the same.

    Transformers fills up every forward pass to whole chunks, of 256 tokens by default. Nemotron-H
    keeps its chunks, because there the logits depend on them.
    """
    if b"mamba_chunk_size" in (folder / "config.json").read_bytes():
        change_config(folder, mamba_chunk_size=32)
    return folder


def _louder_layers(model: Any) -> None:
    """Gemma multiplies embeddings by 16. Its layers must count more than they do, or a random model
    repeats the last token; and its logits must be further apart."""
    for path, weight in model.named_parameters():
        if "post_" in path and path.endswith("layernorm.weight"):
            weight.add_(3.0)
        elif path.endswith(".norm.weight"):
            weight.add_(9.0)


def _own_factors(model: Any) -> None:
    """Gemma 4 does not divide logits by the width of a head, so the norm of its queries must, or a
    random model looks at single tokens. Each of its layers has a factor of its own."""
    for path, weight in model.named_parameters():
        if path.endswith("q_norm.weight"):
            weight.mul_(0.125)
    for path, buffer in model.named_buffers():
        if path.endswith("layer_scalar"):
            buffer.fill_(0.9)


def _spread(path: str, weight: torch.Tensor, draw: torch.Generator) -> None:
    noise = torch.randn(weight.shape, generator=draw)
    if path.endswith("sinks"):
        weight.copy_(noise)
    elif path.endswith("bias"):
        weight.add_(noise * (0.02 if "correction" in path else 0.3))
    elif "norm" in path.lower():
        weight.add_(noise * 0.2)
