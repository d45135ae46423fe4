"""Bytes of a model's weights from its `config.json` alone, about. Needs no torch.

It counts the matrices of attention, of states, of dense and expert layers, and of the embeddings.
That is within a few percent for language models; towers for images are not counted. Where weight
files are there, their size is the answer, and not this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from statistics import fmean
from typing import Any

from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.geometry import (
    LATENT,
    OUTPUT_GATE,
    experts,
    is_latent,
    layer_count,
    layer_kinds,
    number,
    quantization,
)
from oscar_zoo.models.other_layers import BOTH, state_shape

_BF16 = 16.0
_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5, "mxfp8": 8.25}
"""Of one number of a quantized matrix, its scales included, by method or algorithm."""
_ALGORITHM = re.compile(r"w([48])a[0-9]+(?:_awq|_int8|_fp8|_sq_.+)?|(fp8)_.+|(nvfp4)_.+")
_WIDTHS = range(1, 9)
_SKIPPED = (
    "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "exclude_modules",
    "ignore",
)  # fmt: skip
"""Where a configuration lists what stays whole."""
_HEAD = "lm_head"
"""Some methods never quantize it."""
_MIXERS = {"linear_attention": ("linear_attn.out_proj",), "mamba": ("mamba.out_proj",)}
_ATTENTION = ("self_attn.q_proj", "self_attn.o_proj")
_MATRICES = ("gate_proj", "up_proj", "down_proj")
"""Names of matrices that stand for their layer when it is asked how many bits they have."""
_STATES = ("linear_attention", "mamba")
_UNKNOWN = ("M", "E", "-", "conv", "mlp", "moe")
"""Kinds of layers whose matrices are of shapes that are not known here."""

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
    """Bytes of all weights; `None` where the file does not say enough."""
    text = config.get_text_config()
    hidden, vocabulary = number(text, "hidden_size"), number(text, "vocab_size")
    layers, heads = layer_count(text), number(text, "num_attention_heads")
    routed = experts(text)
    inner = number(text, "intermediate_size")
    if not (hidden and vocabulary and layers and heads) or not (inner or routed):
        return None
    mixers = mixer_numbers(text, layers)
    if mixers is None:
        return None
    if routed and number(text, "interleave_moe_layer_step") > 1:
        return None  # only some of their layers have experts
    dense = min(layers, number(text, "first_k_dense_replace")) if routed else layers
    shared = _shared(text)
    sparse, expert = range(dense, layers), _expert_size(text)
    plural = "s" if any(number(text, one) for one in _SHARED_COUNTS) else ""
    parts = [
        (mixers, _mixers(text, layers)),
        (dense * 3 * hidden * inner, _names(range(dense), "mlp")),
        (len(sparse) * 3 * hidden * routed * expert, _names(sparse, "mlp.experts.0")),
        (len(sparse) * 3 * hidden * shared, _names(sparse, f"mlp.shared_expert{plural}")),
        (0 if getattr(text, "tie_word_embeddings", False) else vocabulary * hidden, [_HEAD]),
    ]
    try:
        bits_of = _bits_by_name(quantization(config))
        bits = sum(numbers * bits_of(names) for numbers, names in parts if numbers)
    except _UnknownFormat:
        return None
    return round((bits + vocabulary * hidden * _BF16) / 8)


def weights_of_name(name: str) -> int | None:
    """Bytes of all weights by the size in a name, such as `Qwen3-14B`, in BF16 or FP8; `None` where
    the name has no size, or one that is not that of all weights."""
    found = [1e9 * float(size) for size in _SIZE.findall(name)]
    found = found or [1e6 * float(size) for size in _MILLIONS.findall(name)]
    if len(found) != 1 or _ACTIVE.search(name) or _PACKED.search(name):
        return None
    return round(found[0] * (1 if "fp8" in name.casefold() else 2))


def _expert_size(text: Any) -> int:
    return number(text, "moe_intermediate_size") or number(text, "intermediate_size")


def _shared(text: Any) -> int:
    widths = max(number(text, name) for name in _SHARED)
    return widths or max(number(text, name) for name in _SHARED_COUNTS) * _expert_size(text)


def _names(layers: Iterable[int], module: str) -> list[str]:
    return [f"layers.{layer}.{module}.{matrix}" for layer in layers for matrix in _MATRICES]


def _mixers(text: Any, layers: int) -> list[str]:
    kinds, interval = layer_kinds(text), number(text, "full_attention_interval")
    kinds = kinds or [
        "linear_attention" if interval and (layer + 1) % interval else "" for layer in range(layers)
    ]
    return [
        f"layers.{layer}.{matrix}"
        for layer, kind in enumerate(kinds)
        for matrix in _MIXERS.get(kind, _ATTENTION)
    ]


class _UnknownFormat(Exception):
    """A format of weights that is not known here."""


def _bits_by_name(given: Any) -> Callable[[list[str]], float]:
    """Bits of a number of matrices, on average, by their names: all have one format, but for those
    that the configuration keeps in 16 bits."""
    if given is None:
        return lambda names: _BF16
    if not isinstance(given, dict):
        raise _UnknownFormat
    method, groups = str(given.get("quant_method")).casefold(), given.get("config_groups")
    sparse = given.get("sparsity_config") or {"format": "dense"}
    if given.get("dynamic") or not isinstance(sparse, dict) or sparse.get("format") != "dense":
        raise _UnknownFormat
    skipped = [one for key in _SKIPPED for one in _texts(given.get(key) or [])]
    if isinstance(groups, dict) and groups:
        bits = _bits_of_group(groups)
    else:
        bits = _bits_of_method(given, method)
        skipped += [] if given.get(_HEAD) is True else [_HEAD]
    patterns = [_pattern(one) for one in skipped]

    def whole(name: str) -> bool:
        others = method == "mxfp4" and "experts" not in name
        return others or any(one.match(f".{name}.") for one in patterns)

    return lambda names: fmean(_BF16 if whole(name) else bits for name in names)


def _bits_of_method(given: Mapping[str, Any], method: str) -> float:
    if given.get("load_in_4bit") is True:  # blocks of 64 numbers; scales of scales have 32 bits
        return 4 + (8 + 32 / 256 if given.get("bnb_4bit_use_double_quant") else 32) / 64
    if given.get("load_in_8bit") is True:
        return 8.0
    if method in ("awq", "gptq"):
        bits = _width(given.get("bits"))
        return bits + _scales(given.get("group_size"), 16 + bits)  # and a zero point
    algorithm = str(given.get("quant_algo", method)).casefold()
    named = _ALGORITHM.fullmatch(algorithm)
    if named and named[1]:
        bits = int(named[1])
        return bits + (_scales(given.get("group_size", 128), 16) if bits < 8 else 0)
    algorithm = named[2] or named[3] if named else algorithm
    if algorithm not in _BITS:
        raise _UnknownFormat
    return _BITS[algorithm]


def _bits_of_group(groups: Mapping[str, Any]) -> float:
    """Of the one group that all linear layers are in; several groups are not known here."""
    (group, *others) = groups.values()
    linear = isinstance(group, dict) and group.get("targets") == ["Linear"]
    weights = group.get("weights") if linear else None
    if others or not isinstance(weights, dict):
        raise _UnknownFormat
    bits = _width(weights.get("num_bits"))
    whole = weights.get("type") == "float" or weights.get("symmetric", True)
    per_group = 8 if weights.get("type") == "float" else 16 + (0 if whole else bits)
    return bits + _scales(weights.get("group_size"), per_group)


def _width(bits: Any) -> int:
    if type(bits) is not int or bits not in _WIDTHS:
        raise _UnknownFormat
    return bits


def _scales(size: Any, bits: float) -> float:
    """Bits of a number for the `bits` that a group of `size` numbers has; rows are no groups."""
    if size in (None, -1, 0):
        return 0.0
    if type(size) is not int or size < 1:
        raise _UnknownFormat
    return bits / size


def _texts(given: Any) -> list[str]:
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise _UnknownFormat
    return given


def _pattern(pattern: str) -> re.Pattern[str]:
    """What matches the names that `pattern` means, and what is inside of them. A regular expression
    of a file is never run: one that says more than `.*` is an unknown format."""
    if pattern.startswith("re:"):
        pattern = pattern[3:].removeprefix("^").replace("\\.", ".").replace(".*", "*")
        pattern = pattern.removesuffix("$") if pattern.endswith("$") else f"{pattern}*"
        if set(pattern) & set("\\[](){}|+?"):
            raise _UnknownFormat
    for prefix in ("model.", "language_model.", "model."):
        pattern = pattern.removeprefix(prefix)
    return re.compile(translate(f"*.{pattern.strip('.')}.*"))


def mixer_numbers(text: Any, layers: int) -> int | None:
    kinds, interval = layer_kinds(text), number(text, "full_attention_interval")
    states = layers - layers // interval if interval else 0
    if kinds is not None:
        if any(kind in _UNKNOWN for kind in kinds):
            return None
        states = sum(kind in _STATES for kind in kinds)
    attention = layers - states
    if getattr(text, "model_type", "") in BOTH:
        states = attention = layers
    matrices = (state_shape(text) or (0,))[0]
    if states and not matrices:
        return None
    return attention * _attention(text) + states * matrices


def _attention(text: Any) -> int:
    """Queries, keys, values and output; a gate of the output is as large as the queries."""
    hidden, heads = number(text, "hidden_size"), number(text, "num_attention_heads")
    if is_latent(text):
        rank, rope = number(text, LATENT), number(text, "qk_rope_head_dim")
        plain, value = number(text, "qk_nope_head_dim"), number(text, "v_head_dim")
        between = number(text, "q_lora_rank")
        queries = heads * (plain + rope)
        queries = between * (hidden + queries) if between else hidden * queries
        return queries + hidden * (rank + rope) + heads * (rank * (plain + value) + value * hidden)
    width = number(text, "head_dim") or hidden // heads
    gated = getattr(text, "attn_output_gate", None)
    if gated is None:
        gated = getattr(text, "model_type", "") in OUTPUT_GATE
    keys = 2 * (number(text, "num_key_value_heads") or heads)
    return hidden * width * ((3 if gated else 2) * heads + keys)
