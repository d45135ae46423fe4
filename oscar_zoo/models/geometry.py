"""From a model's configuration to the manifest's model block, without weights.

Only layers that own a full-attention cache count. A value that the configuration does not state
stays `None`. Models whose cache is not one K row and one V row per token and head are refused by
name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import ValidationError

from oscar_zoo.artifact.formats import has_hadamard
from oscar_zoo.artifact.manifest import ModelBlock, WeightsInfo
from oscar_zoo.artifact.specs import Rope
from oscar_zoo.errors import InvalidModel, UnsupportedModel

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
FULL_KINDS = frozenset((FULL_ATTENTION, "attention", "hybrid"))
"""Kinds of layers with full attention; the last two are what hybrids with Mamba layers say."""
_LAYERS = "num_hidden_layers"
WINDOW_PATTERN = "hybrid_layer_pattern"
"""Where MiMo-V2 says which layers have a sliding window."""
PER_LAYER = "per_layer_config"
"""Where newer releases of transformers write values of single layers, in place of `GLOBAL`."""
GLOBAL = ("global_head_dim", "num_global_key_value_heads")
"""Where older releases write those of the full-attention layers of Gemma 4."""
PER_LAYER_SINCE = (5, 15)
"""The first transformers known to read `per_layer_config`."""
MIXED = (
    "cohere2", "exaone4", "exaone_moe", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text",
    "gemma4_unified", "gemma4_unified_text", "gpt_oss", "mellum", "olmo3",
)  # fmt: skip
"""Model types with windows in some layers, whose files often do not say in which."""
QK_NORM = frozenset(
    "gemma3_text minimax_m2 olmo2 qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text".split()
)
OUTPUT_GATE = frozenset(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
NEITHER = frozenset(("gpt_oss", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe"))
"""Model types that normalise queries and keys, that gate the attention output, and that do neither,
where no configuration key says it. For other types it is not known."""
STOCK = "serve it with SGLang alone, without an INT2 cache"
STATES = frozenset(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"))
"""Model types without any attention."""


def model_block(
    config: Any, *, model_id: str, revision: str | None, config_sha256: str
) -> ModelBlock:
    """Describe a model from a configuration of the whole of it. A `revision` that is no commit is
    recorded as unknown; `config_sha256` is of the bytes of `config.json`."""
    text = config.get_text_config(decoder=True)
    refuse_other_caches(config, text, model_id)
    heads = _required(text, "num_attention_heads", model_id)
    layers = _attention_layers(text, model_id)
    rotary_key = _required(text, "qk_rope_head_dim", model_id) if is_latent(text) else None
    if rotary_key is None:
        head_dim, num_kv_heads = _full_shape(text, model_id, heads, layers[0])
        v_head_dim = getattr(text, "v_head_dim", None) or head_dim
    else:
        head_dim = v_head_dim = _required(text, LATENT, model_id)
        num_kv_heads = 1
    refuse_widths((head_dim, v_head_dim), f"{model_id} ({text.model_type})")
    try:
        return ModelBlock(
            num_layers=_layers(text, model_id),
            num_q_heads=heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            attention_layers=layers,
            rotary_key=rotary_key,
            id=model_id,
            revision=revision if revision and re.fullmatch(r"[0-9a-f]{40}", revision) else None,
            config_sha256=config_sha256,
            rope=_rope(text, head_dim, rotary_key),
            qk_norm=_said_or_known(text, "use_qk_norm", QK_NORM),
            output_gate=_said_or_known(text, "attn_output_gate", OUTPUT_GATE),
            weights=_weights(config, text),
            compatible_with=(),
        )
    except ValidationError as error:
        first = error.errors()[0]
        said = f"{'.'.join(map(str, first['loc']))} {first['msg']}"
        message = f"the configuration of {model_id} contradicts itself: {said}."
        raise InvalidModel(message, hint="check its config.json") from None


def sliding_window(text: Any) -> int | None:
    """How many tokens a sliding-window layer sees; `None` where the window hides nothing."""
    window = getattr(text, "sliding_window", None)
    if not window or getattr(text, "use_sliding_window", None) is False:
        return None
    return None if covers_context(window, text) else int(window)


def full_kinds(text: Any) -> frozenset[str]:
    """The names in `layer_types` of layers that see every token."""
    window = getattr(text, "sliding_window", None)
    whole = window and covers_context(window, text)
    return FULL_KINDS | {SLIDING_ATTENTION} if whole else FULL_KINDS


def layer_kinds(text: Any) -> Sequence[str] | None:
    """What the configuration says of each layer, in the words of `layer_types`, if it does.
    Nemotron-H has a letter for each, or another name, MiMo-V2 a 1 for a sliding window, and files
    of Qwen2 and Qwen3 without `layer_types` say where the windows begin."""
    said = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    letters = getattr(text, "hybrid_override_pattern", None)
    windows = getattr(text, WINDOW_PATTERN, None)
    if said is None and letters:
        return [FULL_ATTENTION if letter == "*" else letter for letter in letters]
    if said is None and windows:
        return [SLIDING_ATTENTION if one else FULL_ATTENTION for one in windows]
    first, layers = (getattr(text, name, None) for name in ("max_window_layers", _LAYERS))
    if said is None and first and layers and getattr(text, "use_sliding_window", None) is True:
        return [FULL_ATTENTION if at < first else SLIDING_ATTENTION for at in range(layers)]
    return said


def only_windows(text: Any) -> bool:
    """Whether every layer has a window, as far as a configuration tells."""
    layers = layer_kinds(text)
    if layers is not None:
        return {*layers} == {SLIDING_ATTENTION} - full_kinds(text)
    kind = getattr(text, "model_type", None)
    mixed = getattr(text, "sliding_window_pattern", None) or kind in MIXED
    return sliding_window(text) is not None and not mixed


def no_full_attention(text: Any, model_id: str) -> UnsupportedModel:
    kind = getattr(text, "model_type", "of no type")
    others = " and ".join(dict.fromkeys(one.replace("_", " ") for one in layer_kinds(text) or ()))
    said = f"its layers are {others}" if others else "every layer has a sliding window"
    message = f"{model_id} ({kind}) has no full-attention layer: {said}."
    hint = "serve it with SGLang alone: INT2 saves memory in full-attention layers only"
    return UnsupportedModel(message, hint=hint)


def layer_config(text: Any, layer: int) -> Any:
    """The configuration of one layer. Newer releases of transformers have one for every layer of
    Gemma 4, and write the values in which a layer differs."""
    if getattr(text, "is_heterogeneous", False):
        return text.per_layer_config[layer]
    written = getattr(text, PER_LAYER, None)
    own = written.get(str(layer)) if isinstance(written, dict) else None
    return OneLayer(text, own) if isinstance(own, dict) else text


class OneLayer:
    def __init__(self, text: Any, own: dict[str, Any]) -> None:
        self._text, self._own = text, dict.fromkeys(GLOBAL) | own

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__["_own"]
        return own[name] if name in own else getattr(self.__dict__["_text"], name)


def number(text: Any, name: str) -> int:
    """A whole number of a configuration, 0 where it has none of this name."""
    value = getattr(text, name, None)
    return value if isinstance(value, int) else 0


def layer_count(text: Any) -> int:
    """How many layers there are, 0 where the file does not say it."""
    return len(layer_kinds(text) or ()) or number(text, "num_hidden_layers")


def experts(text: Any) -> int:
    """How many experts a layer has, of which the router picks some; 0 where it has none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((number(text, name) for name in names if number(text, name)), 0)


def covers_context(window: int, text: Any) -> bool:
    longest = getattr(text, "max_position_embeddings", None)
    return isinstance(longest, int) and window >= longest


def quantization(config: Any) -> Any:
    """What a configuration says of quantized weights, `None` if nothing."""
    names = ("quantization_config", "compression_config")
    parts = (config, config.get_text_config(decoder=True))
    return next(filter(None, (getattr(part, name, None) for part in parts for name in names)), None)


def float8_block(config: Any, model_id: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale in a float8 checkpoint, if it is one."""
    given = quantization(config)
    method = str(_entry(given, "quant_method") or "an unnamed method")
    if given is None or method == "mxfp4":
        return None
    if method != "fp8":
        raise UnsupportedModel(
            f"{model_id} is quantized with {method}, which is not read here.",
            hint="use its bfloat16 or fp8 checkpoint, whose rotation serves these weights, too:"
            " oscar-zoo serve ROTATION --model FOLDER",
        )
    block = _entry(given, "weight_block_size") or (128, 128)
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        message = f"{model_id} has weight_block_size {block!r}, not two sizes."
        raise InvalidModel(message, hint="check its config.json")
    return int(block[0]), int(block[1])


def _entry(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, dict) else getattr(given, name, None)


def _required(text: Any, name: str, model_id: str) -> int:
    value = getattr(text, name, None)
    if not isinstance(value, int) or value <= 0:
        message = f"the configuration of {model_id} ({text.model_type}) has no {name}."
        raise InvalidModel(message, hint="only decoder-only models with attention are supported")
    return value


def _layers(text: Any, model_id: str) -> int:
    said = number(text, "num_hidden_layers") or len(layer_kinds(text) or ())
    return said or _required(text, "num_hidden_layers", model_id)


def _full_shape(text: Any, model_id: str, heads: int, layer: int) -> tuple[int, int]:
    """Head width and KV heads of the full-attention layers, of which `layer` is one. Those of Gemma
    4 have values of their own, and may make V from the weights of K; the cache holds both."""
    text = layer_config(text, layer)
    head_dim = getattr(text, "global_head_dim", None) or getattr(text, "head_dim", None)
    num_kv_heads = getattr(text, "num_key_value_heads", None)
    if getattr(text, "attention_k_eq_v", False):
        num_kv_heads = getattr(text, "num_global_key_value_heads", None) or num_kv_heads
    return head_dim or _required(text, "hidden_size", model_id) // heads, num_kv_heads or heads


def _attention_layers(text: Any, model_id: str) -> tuple[int, ...]:
    kinds = layer_kinds(text)
    interval = getattr(text, "full_attention_interval", None)
    count = _layers(text, model_id)
    if kinds is not None:
        full = full_kinds(text)
        layers = tuple(i for i, kind in enumerate(kinds) if kind in full)
    elif interval:
        layers = tuple(range(interval - 1, count, interval))
    else:
        layers = () if sliding_window(text) else tuple(range(count))
    if not layers:
        raise no_full_attention(text, model_id)
    return layers


def _rope(text: Any, head_dim: int, rotary_key: int | None) -> Rope | None:
    given = getattr(text, "rope_parameters", None) or {}
    given = given.get(FULL_ATTENTION, given)
    if not given:
        return None
    kind = str(given.get("rope_type", "default"))
    theta, factor = given.get("rope_theta"), given.get("factor")
    return Rope(
        type=kind,
        theta=None if theta is None else float(theta),
        scaling=None if kind == "default" else kind,
        factor=None if factor is None else float(factor),
        rotary_dim=rotary_key or round(head_dim * float(given.get("partial_rotary_factor") or 1.0)),
        max_position=getattr(text, "max_position_embeddings", None),
    )


def _said_or_known(text: Any, name: str, types: frozenset[str]) -> bool | None:
    said, kind = getattr(text, name, None), text.model_type
    if said is not None:
        return bool(said)
    return kind in types if kind in QK_NORM | OUTPUT_GATE | NEITHER else None


def _weights(config: Any, text: Any) -> WeightsInfo | None:
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    if dtype is None:
        return None
    method = _entry(quantization(config), "quant_method")
    return WeightsInfo(dtype=str(dtype).removeprefix("torch."), quantization=method)


ONLY_A_STATE = (
    "has no attention; it keeps a state of fixed size, and there is no cache to compress",
    STOCK,
)
OTHER_CACHES = {
    "is_encoder_decoder": (
        "is an encoder-decoder model; its decoder attends to the encoder, and only models that"
        " attend to their own tokens have an INT2 cache",
        "choose a decoder-only model",
    ),
    "cross_attention_layers": (
        "has cross-attention layers; they cache an image instead of tokens, and an INT2 cache holds"
        " tokens",
        "choose a model that puts its images among the tokens, such as Qwen3-VL or Gemma 3",
    ),
    "index_topk": (
        "picks the rows that it reads with an index; its cache has another row for that, and only"
        " models that read all rows have an INT2 cache",
        STOCK,
    ),
    "num_kv_shared_layers": (
        "shares one KV cache between layers; an INT2 cache needs rows of its own for every layer",
        f"{STOCK}, or choose a larger model of the family, whose layers share nothing",
    ),
}
"""A key that only the configuration of such a model sets -> what it does, in words that follow its
name, and what works. The first that holds is told."""


def refuse_other_caches(config: Any, text: Any, model_id: str) -> None:
    """Refuse a model that cannot have an INT2 cache, by its configuration alone."""
    kind = getattr(text, "model_type", None) or getattr(config, "model_type", "of no type")
    found = [ONLY_A_STATE] if getattr(text, "model_type", None) in STATES else []
    for key, row in OTHER_CACHES.items():
        whole = config if key == "is_encoder_decoder" else text
        found += [row] if getattr(whole, key, None) or getattr(text, key, None) else []
    if found:
        reason, instead = found[0]
        raise UnsupportedModel(f"{model_id} ({kind}) {reason}.", hint=instead)


LATENT = "kv_lora_rank"
"""The key of models with multi-head latent attention: the channels of a latent."""


def is_latent(text: Any) -> bool:
    return number(text, LATENT) > 0


def refuse_latents(text: Any, model_id: str, why: str = "serving them here is not built") -> None:
    """Refuse a model with multi-head latent attention where no cache of latents is served."""
    if not is_latent(text):
        return
    rank, rope = number(text, LATENT), number(text, "qk_rope_head_dim")
    small = rank // 4 + 4 * -(-rank // 128) + 2 * rope
    raise UnsupportedModel(
        f"{model_id} ({getattr(text, 'model_type', 'of no type')}) uses multi-head latent attention"
        f" (MLA): codes of 2 bits would store {small} bytes per token and layer in place of"
        f" {2 * (rank + rope)}, and {why}.",
        hint=f"{STOCK}; oscar-zoo serve takes some such models on a GPU, see docs/mla.md",
    )


def refuse_widths(widths: tuple[int, int], name: str) -> None:
    for width in widths:
        if not has_hadamard(width):
            why = f"heads of {width} channels, and no Hadamard matrix of that width is known here"
            hint = f"{STOCK}, or choose a model with heads of 64, 96, 128 or 256 channels"
            raise UnsupportedModel(f"{name} has {why}.", hint=hint)


def refuse_misread(text: Any, model_id: str) -> None:
    """Refuse a model whose head sizes the installed transformers would replace by others, without a
    word: newer releases write `per_layer_config` and leave out the names that older ones read."""
    here = installed()
    if here is None or reads_layers(here):
        return
    if isinstance(getattr(text, "per_layer_config", None), dict):
        kind = getattr(text, "model_type", "of no type")
        sizes = "gives the sizes of its heads as per_layer_config, which"
        message = f"{model_id} ({kind}) {sizes} transformers {here} does not read."
        raise UnsupportedModel(message, hint="install SGLang 0.5.23 with its own transformers")


def installed() -> str | None:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def reads_layers(release: str) -> bool:
    return _numbers(release) >= PER_LAYER_SINCE


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:3] if part.isdecimal())
