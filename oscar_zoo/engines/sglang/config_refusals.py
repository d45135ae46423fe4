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


def _told_earlier(name: str, uses: Callable[[Any], bool]) -> Refusal:
    """The row of `MODEL` called `name`, decided by `uses`."""
    return replace(next(row for row in MODEL if row.name == name), uses=uses)


CONFIG = (
    _told_earlier("chunked local attention", _chunks),
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


OWN_CODE = ("mimo_v2", "mimo_v2_flash")
"""Model types that SGLang reads with the configuration class of the checkpoint alone, or that it
reads wrongly with the class of transformers."""


def check_config(config: ConfigFile, model_id: str) -> None:
    """Refuse a model by its `config.json`; the part about the language model comes first.

    What `compute` and `eval` refuse is refused here in the same sentence.

    Args:
        config: the file.
        model_id: what messages call the model.

    Raises:
        UnsupportedModel: names the property, the reason and what to use in its place.
    """
    check_cache(config, model_id)
    text = config.get_text_config()
    for part in (text, config):
        check_rows(part, CONFIG, UnsupportedModel)
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
