"""Models that an INT2 cache does not serve, recognized by their `config.json` before SGLang reads
it.

The reasons are those of `models`, and of `model_refusals`, whose rows look at what SGLang made of
the file. These look at the file itself and take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oscar_zoo.engines.sglang.model_refusals import MODEL
from oscar_zoo.engines.sglang.refusal import Refusal, check_rows
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models import geometry
from oscar_zoo.models.config_file import ConfigFile, check_cache


def _has(name: str, *kinds: str) -> Callable[[Any], bool]:
    """Whether the value `name` is set, or a layer is of one of `kinds`."""

    def uses(config: Any) -> bool:
        layers = set(getattr(config, "layer_types", None) or ())
        return bool(getattr(config, name, None)) or bool(layers & set(kinds))

    return uses


def _kind(*model_types: str) -> Callable[[Any], bool]:
    """Whether the file calls the model one of these."""
    return lambda config: getattr(config, "model_type", None) in model_types


def _chunks(config: Any) -> bool:
    """Whether a layer sees chunks. MiMo-V2 gives the size of chunks beside that of its windows, and
    has no chunks."""
    uses = _has("attention_chunk_size", "chunked_attention")
    return uses(config) and not getattr(config, geometry.WINDOW_PATTERN, None)


def _lacks(name: str, *model_types: str) -> Callable[[Any], bool]:
    """Whether a model of one of these types is without the value `name`."""
    return lambda config: _kind(*model_types)(config) and getattr(config, name, None) is None


def _rotated_otherwise(read: str | None, usual: float, *model_types: str) -> Callable[[Any], bool]:
    """Whether SGLang rotates by another base than the file says.

    Args:
        read: the value that SGLang takes, or `None` where it takes `usual` whatever the file says.
    """

    def uses(config: Any) -> bool:
        taken = getattr(config, read or "", None) or usual
        given = getattr(config, "rope_parameters", None) or {}
        said = given.get("rope_theta") or getattr(config, "rope_theta", None) or taken
        return _kind(*model_types)(config) and float(said) != float(taken)

    return uses


def _told_earlier(name: str, uses: Callable[[Any], bool]) -> Refusal:
    """The row of `MODEL` called `name`, decided by `uses`."""
    return replace(next(row for row in MODEL if row.name == name), uses=uses)


CONFIG = (
    _told_earlier("chunked local attention", _chunks),
    _told_earlier("sparse attention with an index", _has("indexer_n_heads")),
)
"""Rows over a `config.json`, and over its part about the language model."""

MISREAD = (
    Refusal(
        "EXAONE with another rope_theta than 1000000",
        _rotated_otherwise(None, 1e6, "exaone4", "exaone_moe"),
        "SGLang rotates by 1000000 whatever the file says, and its answers differ",
        "a model of this family with the usual value",
    ),
    Refusal(
        "Qwen3-Next with a rope_theta in rope_parameters alone",
        _rotated_otherwise("rope_theta", 1e4, "qwen3_next"),
        "SGLang reads it beside the other values of this model",
        "write it there, too",
    ),
    Refusal(
        "Qwen3-Next or Qwen3.5 without full_attention_interval in config.json",
        _lacks("full_attention_interval", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        "SGLang reads it, and transformers writes layer_types in its place",
        "add it: the number of layers from one with full attention to the next",
    ),
    Refusal(
        "gpt-oss without swiglu_limit in config.json",
        _lacks("swiglu_limit", "gpt_oss"),
        "SGLang reads it, and transformers does not write it",
        'add it as openai/gpt-oss-20b has it: "swiglu_limit": 7.0',
    ),
)
"""The same: what SGLang reads otherwise than it is written, or misses."""

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


OWN_CODE = ("mimo_v2", "mimo_v2_flash")
"""Model types that SGLang reads with the configuration class of the checkpoint alone, or that it
reads wrongly with the class of transformers."""


def check_config(config: ConfigFile, model_id: str) -> None:
    """Refuse a model by its `config.json`; the part about the language model comes first.

    What `compute` and `eval` refuse is refused here in the same sentence.
    """
    check_cache(config, model_id)
    text = config.get_text_config()
    for part in (text, config):
        check_rows(part, CONFIG + MISREAD, UnsupportedModel)
    check_rows(config, WHOLE, UnsupportedModel)
    if _kind(*OWN_CODE)(config):
        raise UnsupportedModel(
            f"SGLang reads the configuration of {model_id} ({config.model_type}) with code that"
            " ships with the model, which oscar-zoo serve never runs.",
            hint="if you trust that code: python -P -m sglang.launch_server --model-path ..."
            " --trust-remote-code --kv-cache-dtype int2 --oscar-artifact NAME",
        )
    if not getattr(config, "architectures", None):
        raise UnsupportedModel(
            f"the config.json of {model_id} has no architectures, and SGLang chooses by them.",
            hint='add them as the model has them on its hub: "architectures": ["..."]',
        )
