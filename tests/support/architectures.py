"""A small random model of every architecture that people serve, as checkpoint folders.

They have four layers, mostly 64 channels per head, two KV heads for four query heads, and the
values in which their configuration class differs from others. Weights are random, so perplexities
say nothing; tokens can be compared with those of transformers.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from architecture_rows import ARCHITECTURES
from safetensors.torch import load_file, save_file
from tiny_models import EXAMPLE, TOKENIZER, change_config

__all__ = [
    "ARCHITECTURES",
    "shorten_chunks",
    "write_architecture",
    "write_config",
    "write_mtp_model",
]


def write_config(name: str, folder: Path) -> Path:
    """`config.json` alone, for what is decided before weights are read."""
    tiny = ARCHITECTURES[name]
    tiny.configuration().save_pretrained(folder)
    change_config(folder, architectures=[tiny.hub_class or f"{tiny.config}ForCausalLM"])
    return folder


def write_architecture(name: str, folder: Path, *, dtype: str | None = None) -> Path:
    """A checkpoint with the example's tokenizer. Biases, norms and sinks are moved away from their
    trivial values. `dtype` is of the stored weights."""
    import transformers

    from oscar_zoo.models.model_source import outline

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


def write_mtp_model(name: str, folder: Path) -> Path:
    """A GLM-4.5 (`glm4_moe`) or Qwen3.5 (`qwen3_5`) with a layer for the next token but one, which
    transformers leaves out: a copy of the last layer with attention, behind a projection of the
    last token and its hidden state."""
    write_architecture(name, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    last = max(
        (path.partition("self_attn.")[0] for path in weights if "self_attn." in path),
        key=lambda path: int(path.split(".")[-2]),
    )
    inner = last.rpartition("layers.")[0]
    norm, tokens = weights[f"{inner}norm.weight"], weights[f"{inner}embed_tokens.weight"]
    draw = torch.Generator().manual_seed(11)
    projection = torch.randn(len(norm), 2 * len(norm), generator=draw) * 0.1
    if name == "glm4_moe":
        count = ARCHITECTURES[name].configuration().num_hidden_layers
        own = layer = f"{inner}layers.{count}."
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        added = {"embed_tokens": tokens, "shared_head.head": weights["lm_head.weight"]}
    else:
        own, layer, added = "mtp.", "mtp.layers.0.", {}
        names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    added |= dict(zip(names, [projection.to(norm.dtype), norm, norm, norm], strict=True))
    copies = {layer + path.removeprefix(last): path for path in weights if path.startswith(last)}
    weights |= {path: weights[source].clone() for path, source in copies.items()}
    weights |= {f"{own}{path}.weight": weight.clone() for path, weight in added.items()}
    save_file(weights, file, metadata={"format": "pt"})
    if name == "glm4_moe":
        change_config(folder, num_nextn_predict_layers=1)
    else:
        change_config(folder, mtp_num_hidden_layers=1)
    return folder


def shorten_chunks(folder: Path) -> Path:
    """Let Mamba layers compute chunks of 32 tokens, with which the sums stay the same: transformers
    fills up every pass to whole chunks, of 256. The logits of Nemotron-H depend on them."""
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
