"""Models whose cache is not one K row and one V row per token and head, refused by name.

A configuration alone decides, so nothing is read or downloaded for such a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oscar_zoo.errors import UnsupportedModel

STOCK = "serve it with SGLang alone, without an INT2 cache"


@dataclass(frozen=True)
class OtherCache:
    """One kind of model.

    Attributes:
        uses: whether a configuration, and its part about the language model, describes one.
        reason: ends the sentence that begins with the model's name.
        instead: what works.
    """

    uses: Callable[[Any, Any], bool]
    reason: str
    instead: str


STATES = frozenset(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"))
"""Model types without any attention."""

OTHER_CACHES = (
    OtherCache(
        lambda config, text: getattr(text, "model_type", None) in STATES,
        "has no attention; it keeps a state of fixed size, and there is no cache to compress",
        STOCK,
    ),
    OtherCache(
        lambda config, text: (
            bool(getattr(config, "is_encoder_decoder", False))
            or bool(getattr(text, "is_encoder_decoder", False))
        ),
        "is an encoder-decoder model; its decoder attends to the encoder, and only models that"
        " attend to their own tokens have an INT2 cache",
        "choose a decoder-only model",
    ),
    OtherCache(
        lambda config, text: bool(getattr(text, "cross_attention_layers", None)),
        "has cross-attention layers; they cache an image instead of tokens, and an INT2 cache holds"
        " tokens",
        "choose a model that puts its images among the tokens, such as Qwen3-VL or Gemma 3",
    ),
    OtherCache(
        lambda config, text: bool(getattr(text, "kv_lora_rank", None)),
        "uses multi-head latent attention (MLA); its cache is one latent row per token, and an INT2"
        " cache needs K and V rows of heads",
        f"{STOCK}: the latent row is already small",
    ),
    OtherCache(
        lambda config, text: bool(getattr(text, "num_kv_shared_layers", 0)),
        "shares one KV cache between layers; an INT2 cache needs rows of its own for every layer",
        f"{STOCK}, or choose a larger model of the family, whose layers share nothing",
    ),
)
"""The first row that holds is told."""


def refuse_other_caches(config: Any, text: Any, model_id: str) -> None:
    """Refuse a model that cannot have an INT2 cache.

    Args:
        config: a configuration, attributes only.
    """
    kind = getattr(text, "model_type", None) or getattr(config, "model_type", "of no type")
    for row in OTHER_CACHES:
        if row.uses(config, text):
            raise UnsupportedModel(f"{model_id} ({kind}) {row.reason}.", hint=row.instead)
