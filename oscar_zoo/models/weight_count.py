"""Bytes of a model's weights from its `config.json` alone, about. Needs no torch.

It counts the matrices of attention, of states, of dense and expert layers, and of the embeddings.
That is within a few percent for language models; towers for images are not counted. Where weight
files are there, their size is the answer, and not this.
"""

from __future__ import annotations

import re
from typing import Any

from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.geometry import layer_kinds
from oscar_zoo.models.mixer_weights import mixer_numbers

_BF16 = 2.0
_BYTES = {"fp8": 1.0, "mxfp4": 17 / 32, "nvfp4": 9 / 16}
"""Of one number of a quantized matrix, its scales included."""
_SIZE = re.compile(r"(?:^|[-_])([0-9]+(?:\.[0-9]+)?)B(?=[-_.]|$)", re.IGNORECASE)
_MILLIONS = re.compile(r"(?:^|[-_])([0-9]{2,})M(?=[-_.]|$)", re.IGNORECASE)
"""A size such as that of `LFM2-350M`; `1M` in a name means tokens of context."""
_ACTIVE = re.compile(r"[-_][0-9]+E(?=[-_.]|$)", re.IGNORECASE)
"""A number of experts in a name, as in `Llama-4-Scout-17B-16E`: its size is that of one token."""
_PACKED = re.compile(
    r"awq|gptq|gguf|bnb|fp4|[48][-_]?bits?(?![a-z])|(?<![a-z])(?:u?int|[iq])[48](?!\d)|w[48]a"
    r"|gpt-oss|ministral-3",
    re.IGNORECASE,
)
"""Formats of less than 16 bits in a name, and families whose checkpoints have such a format."""
_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")
"""Inner width of the experts that every token passes."""
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts")
"""How many of them there are, where each is as wide as the others."""


def weights_of_config(config: ConfigFile) -> int | None:
    """Bytes of all weights; `None` where the file lacks a size, or has layers that are not known
    here."""
    text = config.get_text_config()
    hidden, vocabulary = _number(text, "hidden_size"), _number(text, "vocab_size")
    layers, heads = _layers(text), _number(text, "num_attention_heads")
    experts = _experts(text)
    inner = _number(text, "intermediate_size")
    if not (hidden and vocabulary and layers and heads) or not (inner or experts):
        return None
    mixers = mixer_numbers(text, layers)
    if mixers is None:
        return None
    if experts and _number(text, "interleave_moe_layer_step") > 1:
        return None  # only some of their layers have experts
    dense = min(layers, _number(text, "first_k_dense_replace")) if experts else layers
    shared = _shared(text)
    matrices = mixers + dense * 3 * hidden * inner
    routed = (layers - dense) * 3 * hidden * (experts * _expert_size(text) + shared)
    tied = bool(getattr(text, "tie_word_embeddings", False))
    embeddings = vocabulary * hidden * (1 if tied else 2)
    packed = _packed(config, text)
    whole = _BF16 if packed == _BYTES["mxfp4"] else packed  # only experts are in MXFP4
    return round(routed * packed + matrices * whole + embeddings * _BF16)


def weights_of_name(name: str) -> int | None:
    """Bytes of all weights by the size in a name, such as `Qwen3-14B`: its billions or millions in
    BF16, or in 8 bits where the name says FP8. `None` where the name has no size, or several, or
    one that is not the size of all weights in 16 bits."""
    found = [1e9 * float(size) for size in _SIZE.findall(name)]
    found = found or [1e6 * float(size) for size in _MILLIONS.findall(name)]
    if len(found) != 1 or _ACTIVE.search(name) or _PACKED.search(name):
        return None
    return round(found[0] * (1 if "fp8" in name.casefold() else 2))


def _layers(text: Any) -> int:
    kinds = layer_kinds(text)
    return len(kinds) if kinds else _number(text, "num_hidden_layers")


def _experts(text: Any) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((_number(text, name) for name in names if _number(text, name)), 0)


def _expert_size(text: Any) -> int:
    return _number(text, "moe_intermediate_size") or _number(text, "intermediate_size")


def _shared(text: Any) -> int:
    """Inner width of the experts that every token passes."""
    widths = max(_number(text, name) for name in _SHARED)
    return widths or max(_number(text, name) for name in _SHARED_COUNTS) * _expert_size(text)


def _packed(config: ConfigFile, text: Any) -> float:
    given = getattr(config, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )
    method = str(given.get("quant_method")) if isinstance(given, dict) else ""
    return _BYTES.get(method, _BF16)


def _number(text: Any, name: str) -> int:
    value = getattr(text, name, None)
    return value if isinstance(value, int) else 0
