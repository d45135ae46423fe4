"""The attention implementation with which every model is loaded.

It is transformers' `sdpa`, except for calls with a soft cap or learned sinks, which `sdpa` would
leave out without a word.
"""

from __future__ import annotations

from typing import Any

# first: it prepares the imports of transformers, or reports what is missing
from oscar_zoo.models import model_source  # noqa: F401

# isort: split

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oscar_zoo.models.softmax import Softmax, attend

EXACT = "oscar_zoo_exact"
"""Its name in transformers."""


def exact_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """One call of transformers' attention interface; returns `[B, T, n_q, dv]` and no weights."""
    softmax = Softmax.of_call(query, rest)
    if softmax.plain:
        result: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, **rest
        )
        return result
    output = attend(query, key, value, attention_mask, softmax)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(EXACT, exact_attention)
AttentionMaskInterface.register(EXACT, sdpa_mask)
