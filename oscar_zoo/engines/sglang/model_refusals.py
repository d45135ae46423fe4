"""Models that the INT2 cache does not support, refused by name at start-up. Needs neither torch nor
sglang."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oscar_zoo.engines.sglang.refusal import STOCK, Refusal, above, check_rows, is_set
from oscar_zoo.errors import UnsupportedModel

TEXT_ONLY = ("gemma3", "gemma4", "gemma4_unified")
"""Model types with images that are served with text alone."""

MODEL = (
    Refusal(
        "MLA",
        lambda model: getattr(getattr(model, "attention_arch", None), "name", None) == "MLA",
        "it caches one latent vector, not keys and values",
        STOCK,
    ),
    Refusal(
        "KV shared between layers",
        lambda model: bool(
            getattr(getattr(model, "hf_text_config", None), "num_kv_shared_layers", None)
        ),
        "every layer needs rows of its own",
        STOCK,
    ),
    Refusal(
        "--enable-multimodal with Gemma",
        lambda model: (
            bool(getattr(model, "is_multimodal", None))
            and getattr(getattr(model, "hf_config", None), "model_type", None) in TEXT_ONLY
        ),
        "tokens of an image would not see later ones of the same image",
        "text only, without --enable-multimodal",
    ),
    Refusal(
        "an encoder-decoder model",
        is_set("is_encoder_decoder"),
        "cross attention has no recent window",
        STOCK,
    ),
    Refusal(
        "chunked local attention",
        lambda model: (
            bool(getattr(model, "attention_chunk_size", None))
            and not getattr(getattr(model, "hf_text_config", None), "hybrid_layer_pattern", None)
        ),
        "SGLang masks chunks in its FlashAttention backend alone, and runs layers beside an INT2"
        " cache in its Triton backend",
        STOCK,
    ),
    Refusal(
        "sparse attention with an index",
        lambda model: (
            getattr(getattr(model, "hf_text_config", None), "indexer_n_heads", None) is not None
        ),
        "its backend replaces the one that reads these slots",
        STOCK,
    ),
)
"""Rows over the model configuration."""

LAYER = (
    Refusal(
        "sliding_window_size", above("sliding_window_size", 0), "windows are not masked", STOCK
    ),
    Refusal(
        "xai_temperature_len",
        above("xai_temperature_len", 0),
        "position-dependent temperature is not implemented",
        STOCK,
    ),
    Refusal("cross attention", is_set("is_cross_attention"), "it has no recent window", STOCK),
    Refusal(
        "attention that is not causal",
        lambda layer: (
            str(getattr(getattr(layer, "attn_type", None), "value", "decoder")) != "decoder"
        ),
        "a token may not see later ones",
        STOCK,
    ),
)
"""Rows over one attention layer of the loaded model."""


SLIDING = (
    Refusal(
        "a layer that has no sliding window, although config.json says so,",
        lambda layer: (getattr(layer, "sliding_window_size", None) or 0) <= 0,
        "SGLang would free tokens that it needs",
        STOCK,
    ),
)
"""Rows over the layers that are not full-attention layers."""


def check_model(config: Any) -> None:
    """Refuse a model by its configuration, attributes only."""
    check_rows(config, MODEL, UnsupportedModel)


def check_layers(layers: Iterable[Any]) -> None:
    """Refuse a model by the attention layers it was built from."""
    for layer in layers:
        check_rows(layer, LAYER, UnsupportedModel)


def check_sliding_layers(layers: Iterable[Any]) -> None:
    """Refuse a model by its layers in the pool for sliding windows."""
    found = list(layers)
    for layer in found:
        check_rows(layer, SLIDING, UnsupportedModel)
    if len({layer.sliding_window_size for layer in found}) > 1:
        raise UnsupportedModel(
            "a model with sliding windows of different sizes does not work with an INT2 KV cache:"
            " SGLang reads the same number of tokens in all of its layers with a window.",
            hint=f"instead: {STOCK}",
        )
