"""What the layers without full attention keep, and layers for drafts (multi-token prediction, MTP),
from a `config.json` alone. Needs no torch.

Shapes are those that SGLang allocates on one GPU (`srt/configs/mamba_utils.py` of 0.5.17 to
0.5.23): a state of a Mamba-2 or linear-attention layer is `[heads, head width, state size]` in
float32 unless the file says otherwise, and the inputs of its convolution are kept in bfloat16.
A `config.json` often outlives its MTP layer, which quantized and fine-tuned copies leave out, so
the names of the weights decide where they are known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.geometry import (
    MIXED,
    full_kinds,
    layer_config,
    layer_count,
    layer_kinds,
    number,
    sliding_window,
)

STATES_PER_REQUEST = 5
"""State slots that a running request takes in SGLang at most: its own, and those that it saves for
the prefix cache while the next pass is prepared."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SLIDING = ("sliding_attention", "swa", "sliding")
BOTH = ("falcon_h1",)
"""Model types whose layers each have a state beside their attention."""

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""What a `config.json` calls the number of such layers. That of Qwen3-Next does not say it."""
PROJECTIONS = {
    "glm4_moe": "model.layers.{layers}.eh_proj.",
    **dict.fromkeys(
        "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next".split(), "mtp.fc."
    ),
}
"""Model types whose layer SGLang drafts with, and how the names of the weights begin that join a
token and the hidden state before it. `layers` is the number of other layers, which come first."""
MARKS = ("mtp", "nextn", "eh_proj")
"""What the names of the weights of such a layer have one of, in any model that SGLang reads."""
UNTRIED = ("ernie4_5_moe", "nemotron_h")
"""Other model types of the zoo whose layer SGLang drafts with; nobody has tried it."""
NEED_COUNT = ("glm4_moe",)
"""Those of which SGLang asks that `config.json` says 1."""


@dataclass(frozen=True)
class OtherLayers:
    """Memory of the layers without full attention, over all GPUs; none of it is in INT2: bytes of
    the states of a running request, and tokens that `layers` with a sliding window keep of it,
    `None` where nobody knows; `dims` are channels of a row of K and of V together."""

    state: int | None = 0
    window: int | None = 0
    layers: int = 0
    num_kv_heads: int = 1
    dims: int = 0

    @property
    def known(self) -> bool:
        return self.state is not None and self.window is not None


def other_layers(config: ConfigFile, attention_layers: Sequence[int]) -> OtherLayers | None:
    """What the layers outside `attention_layers` keep; `None` where the file does not say it."""
    text = config.get_text_config()
    kinds, total = layer_kinds(text), layer_count(text)
    rest = sorted(set(range(total)) - set(attention_layers))
    both = _state(text)  # Falcon-H1: a state beside the attention of the same layer
    if not rest:
        if getattr(text, "model_type", "") not in BOTH:
            return OtherLayers()
        return None if both is None else OtherLayers(state=total * both * STATES_PER_REQUEST)
    window = sliding_window(text)
    slides = [layer for layer in rest if kinds is None or kinds[layer] in _SLIDING]
    sliding = slides if window else []
    none = {"-", "E", "mlp", "moe"} - {*full_kinds(text)}
    rest = [layer for layer in rest if layer not in sliding]
    states = [layer for layer in rest if kinds is None or kinds[layer] not in none]
    if states and both is None:
        return None
    state = len(states) * (both or 0) * STATES_PER_REQUEST
    if not sliding or window is None:
        return OtherLayers(state=state)
    layer = layer_config(text, sliding[0])
    heads = number(layer, "swa_num_key_value_heads") or number(layer, "num_key_value_heads")
    width = number(layer, "swa_head_dim") or number(layer, "head_dim")
    width = width or number(text, "hidden_size") // max(1, number(text, "num_attention_heads"))
    values = number(layer, "swa_v_head_dim") or number(layer, "v_head_dim") or width
    if not heads or not width:
        return None
    return OtherLayers(state, window, len(sliding), heads, width + values)


def kept_by_others(text: Any, geometry: Geometry) -> Literal["states", "windows"] | None:
    """What the layers without full attention keep, if anything; `text` has the `model_type`."""
    kind = getattr(text, "model_type", None)
    if len(geometry.attention_layers) == geometry.num_layers:
        return "states" if kind in BOTH else None
    return "windows" if kind in MIXED or sliding_window(text) is not None else "states"


def _state(text: Any) -> int | None:
    shape = state_shape(text)
    dtype = str(getattr(text, "mamba_ssm_dtype", None) or "float32")
    return None if shape is None else 2 * shape[1] + _BYTES.get(dtype, 4) * shape[2]


def state_shape(text: Any) -> tuple[int, int, int] | None:
    """Numbers of one layer that has a state: in its matrices (0 where they are not known here), in
    the inputs of its convolution, and in the state."""

    def of(name: str) -> int:
        return number(text, name)

    hidden = of("hidden_size")
    if heads := of("linear_num_value_heads"):
        # Qwen3-Next, Qwen3.5: queries, keys, values and a gate; two numbers per head; output
        values, width = heads * of("linear_value_head_dim"), of("linear_key_head_dim")
        keys = of("linear_num_key_heads") * width
        kept = max(0, of("linear_conv_kernel_dim") - 1)
        matrices = hidden * (2 * keys + 3 * values + 2 * heads)
        return (matrices, (2 * keys + values) * kept, values * width)
    if heads := of("mamba_num_heads"):  # Nemotron-H
        inner, size = heads * of("mamba_head_dim"), of("ssm_state_size")
        inputs = inner + 2 * of("n_groups") * size
        return (0, inputs * max(0, of("conv_kernel") - 1), inner * size)
    if heads := of("mamba_n_heads"):
        # Falcon-H1, Granite 4: inputs, a gate, what the states read, a step per head; output
        inner, size = heads * of("mamba_d_head"), of("mamba_d_state")
        read, kept = 2 * of("mamba_n_groups") * size, max(0, of("mamba_d_conv") - 1)
        return (hidden * (3 * inner + read + heads), (inner + read) * kept, inner * size)
    if of("conv_L_cache"):  # LFM2 has no state beside the inputs of its convolutions
        return (0, hidden * max(0, of("conv_L_cache") - 1), 0)
    return None


@dataclass(frozen=True)
class MtpLayers:
    """Whether drafts can come from a layer of the model, and why, as a clause about it: `known`
    that they can, `said` by a `config.json` without the weights, `missing`, or `unknown`."""

    state: Literal["known", "said", "missing", "unknown"]
    why: str


def mtp_layers(config: ConfigFile, names: Collection[str] | None) -> MtpLayers:
    """Look for such layers; `names` are those of all weights, where they are known."""
    text = config.get_text_config()
    kind, said = str(getattr(config, "model_type", None)), _said(config) or _said(text)
    begin = PROJECTIONS.get(kind)
    if begin is None:
        untried = f"nobody has tried the MTP layer of a {kind} with this cache"
        absent = names is not None and not any(mark in name for name in names for mark in MARKS)
        why = untried if said else "it has no known MTP layer"
        return MtpLayers("missing" if absent else "unknown", why)
    if names is None:
        unseen = "its weights are not on this machine"
        if not said:
            return MtpLayers("unknown", unseen)
        return MtpLayers("said", f"its config.json names an MTP layer, but {unseen}")
    begin = begin.format(layers=getattr(text, "num_hidden_layers", None))
    if not any(name.startswith(begin) for name in names):
        lost = "its config.json names an MTP layer, but its weights have none"
        return MtpLayers("missing", lost if said else "it has no MTP layer")
    if kind in NEED_COUNT and said != 1:
        silent = "its weights have an MTP layer, but its config.json names none"
        return MtpLayers("missing", silent)
    return MtpLayers("known", "its weights have one")


def _said(config: Any) -> int:
    found = (getattr(config, name, None) for name in COUNTS)
    return next((count for count in found if isinstance(count, int) and count > 0), 0)
