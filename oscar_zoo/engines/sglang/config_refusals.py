"""Models that an INT2 cache does not serve, recognized by their `config.json` before SGLang reads
it.

The reasons are those of `model_refusals`. Its rows look at what SGLang made of the file; these look
at the file itself and take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oscar_zoo.engines.sglang.model_refusals import MODEL
from oscar_zoo.engines.sglang.refusal import STOCK, Refusal, check_rows
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models import geometry
from oscar_zoo.models.config_file import ConfigFile

MIXED = (
    "cohere2",
    "exaone4",
    "exaone_moe",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "gpt_oss",
    "mellum",
    "olmo3",
)
"""Model types with windows in some layers, whose files often do not say in which."""


def _has(name: str, *kinds: str) -> Callable[[Any], bool]:
    """Whether the value `name` is set, or a layer is of one of `kinds`."""

    def uses(config: Any) -> bool:
        layers = set(getattr(config, "layer_types", None) or ())
        return bool(getattr(config, name, None)) or bool(layers & set(kinds))

    return uses


def _kind(*model_types: str) -> Callable[[Any], bool]:
    """Whether the file calls the model one of these."""
    return lambda config: getattr(config, "model_type", None) in model_types


def _only_windows(config: Any) -> bool:
    """Whether every layer has a window, as far as the file tells."""
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        return {*layers} == {geometry.SLIDING_ATTENTION} - geometry.full_kinds(config)
    mixed = getattr(config, "sliding_window_pattern", None) or _kind(*MIXED)(config)
    return geometry.sliding_window(config) is not None and not mixed


def _told_earlier(name: str, uses: Callable[[Any], bool]) -> Refusal:
    """The row of `MODEL` called `name`, decided by `uses`."""
    return replace(next(row for row in MODEL if row.name == name), uses=uses)


CONFIG = (
    _told_earlier("MLA", _has("kv_lora_rank")),
    Refusal(
        "a model with a sliding window in every layer",
        _only_windows,
        "it has no full-attention layer, and only those have INT2 slots",
        STOCK,
    ),
    _told_earlier("KV shared between layers", _has("num_kv_shared_layers")),
    _told_earlier("chunked local attention", _has("attention_chunk_size", "chunked_attention")),
    _told_earlier("an encoder-decoder model", _has("is_encoder_decoder")),
    _told_earlier("sparse attention with an index", _has("indexer_n_heads")),
)
"""Rows over a `config.json`, and over its part about the language model."""

WHOLE = (
    Refusal(
        "a Gemma 4 checkpoint that is the language model alone",
        _kind("gemma4_text", "gemma4_unified_text"),
        "SGLang reads the two head sizes of its layers from the configuration of a whole Gemma 4"
        " only",
        "a whole checkpoint, such as google/gemma-4-31B-it, which is served with text",
    ),
)
"""Rows over a whole `config.json`."""


def check_config(config: ConfigFile) -> None:
    """Refuse a model by its `config.json`; the part about the language model comes first.

    Raises:
        UnsupportedModel: names the property, the reason and what to use in its place.
    """
    for part in (config.get_text_config(), config):
        check_rows(part, CONFIG, UnsupportedModel)
    check_rows(config, WHOLE, UnsupportedModel)
