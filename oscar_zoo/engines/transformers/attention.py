"""The attention function `oscar_int2` of transformers: `OscarLayer.attend` for the layers of an
`OscarCache`, and exact attention for all others, such as sliding windows and other caches."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from oscar_zoo.engines.transformers.layer import MARK
from oscar_zoo.models.attention import exact_attention

NAME = "oscar_int2"


def oscar_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **rest: Any,
) -> tuple[Tensor, None]:
    layer = getattr(key, MARK, None)
    if layer is None:
        return exact_attention(module, query, key, value, attention_mask, **rest)
    return layer.attend(module, query, attention_mask, rest), None


AttentionInterface.register(NAME, oscar_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # else sliding layers get no mask
