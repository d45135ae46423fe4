"""Numbers in the matrices of attention and of states, from a `config.json` alone. Needs no torch.

Layers of Qwen3-Next and Qwen3.5 have attention or a state, those of Granite 4 too, and those of
Falcon-H1 have both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oscar_zoo.models.geometry import OUTPUT_GATE, layer_kinds
from oscar_zoo.models.other_layers import BOTH

_STATES = ("linear_attention", "mamba")
_UNKNOWN = ("M", "E", "-", "conv", "mlp", "moe")
"""Kinds of layers whose matrices are of shapes that are not known here."""


def mixer_numbers(text: Any, layers: int) -> int | None:
    """Numbers in all `layers` together; `None` where a layer's kind is not known."""
    kinds, interval = layer_kinds(text), _number(text, "full_attention_interval")
    states = layers - layers // interval if interval else 0
    if kinds is not None:
        if any(kind in _UNKNOWN for kind in kinds):
            return None
        states = sum(kind in _STATES for kind in kinds)
    attention = layers - states
    if getattr(text, "model_type", "") in BOTH:
        states = attention = layers
    one = next((count(text) for key, count in _SHAPES.items() if _number(text, key)), None)
    if states and one is None:
        return None
    return attention * _attention(text) + states * (one or 0)


def _attention(text: Any) -> int:
    """Queries, keys, values and output; a gate of the output is as large as the queries."""
    hidden, heads = _number(text, "hidden_size"), _number(text, "num_attention_heads")
    width = _number(text, "head_dim") or hidden // heads
    gated = getattr(text, "attn_output_gate", None)
    if gated is None:
        gated = getattr(text, "model_type", "") in OUTPUT_GATE
    keys = 2 * (_number(text, "num_key_value_heads") or heads)
    return hidden * width * ((3 if gated else 2) * heads + keys)


def _linear(text: Any) -> int:
    """Qwen3-Next and Qwen3.5: queries, keys, values and a gate; two numbers per head; output."""
    heads = _number(text, "linear_num_value_heads")
    values = heads * _number(text, "linear_value_head_dim")
    keys = _number(text, "linear_num_key_heads") * _number(text, "linear_key_head_dim")
    return _number(text, "hidden_size") * (2 * keys + 3 * values + 2 * heads)


def _mamba2(text: Any) -> int:
    """Falcon-H1 and Granite 4: inputs, a gate, what the states read, a step per head; output."""
    heads = _number(text, "mamba_n_heads")
    inner = heads * _number(text, "mamba_d_head")
    read = 2 * _number(text, "mamba_n_groups") * _number(text, "mamba_d_state")
    return _number(text, "hidden_size") * (3 * inner + read + heads)


_SHAPES: Mapping[str, Callable[[Any], int]] = {
    "linear_num_value_heads": _linear,
    "mamba_n_heads": _mamba2,
}
"""A key that a file of some kind has -> the matrices of one state."""


def _number(text: Any, name: str) -> int:
    value = getattr(text, name, None)
    return value if isinstance(value, int) else 0
