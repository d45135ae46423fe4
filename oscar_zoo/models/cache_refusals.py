"""Models that no command works with, recognized by their `config.json` as it is written."""

from __future__ import annotations

from typing import Any

from oscar_zoo.models import geometry
from oscar_zoo.models.config_age import refuse_misread
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.other_caches import refuse_other_caches

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


def check_cache(config: ConfigFile, model_id: str) -> None:
    """Refuse a model whose cache no command works with, in the sentence of `compute` and `eval`.

    Args:
        config: the file.
        model_id: what messages call the model.

    Raises:
        UnsupportedModel: names the property, the reason and what to use in its place.
    """
    text = config.get_text_config()
    refuse_other_caches(config, text, model_id)
    refuse_misread(text, model_id)
    if _only_windows(text):
        raise geometry.no_full_attention(text, model_id)


def _only_windows(config: Any) -> bool:
    """Whether every layer has a window, as far as the file tells."""
    layers = geometry.layer_kinds(config)
    if layers is not None:
        return {*layers} == {geometry.SLIDING_ATTENTION} - geometry.full_kinds(config)
    kind = getattr(config, "model_type", None)
    mixed = getattr(config, "sliding_window_pattern", None) or kind in MIXED
    return geometry.sliding_window(config) is not None and not mixed
