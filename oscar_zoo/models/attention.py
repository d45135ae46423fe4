"""Replace what every full-attention layer of a model computes, and nothing else.

The replacement goes through transformers' attention interface, so simulating a cache needs no copy
of any model architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.exact_attention import exact_attention
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.models.softmax import Softmax

# isort: split

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

AttentionFn = Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]
"""`(layer_id, query [B, n_q, T, d], key [B, n_kv, T, d], value [B, n_kv, T, dv], softmax) -> output
[B, n_q, T, dv]`"""

SCOPE = "oscar_zoo_scope"
BLOCKED = {"position_bias": "a position bias"}
"""Arguments of an attention call that change the softmax in ways that `Softmax` does not know, and
their names in messages. `attention_scope` refuses them."""


@contextmanager
def attention_scope(model: LoadedModel, fn: AttentionFn) -> Iterator[None]:
    """Send every full-attention call of `model` to `fn` while the scope is open.

    Queries and keys arrive after qk-norm and RoPE, keys and values before head repetition, and no
    mask arrives: `fn` decides which keys each query reads. Layers of other kinds compute as always.
    Batches must not be padded.
    """
    wanted, seen = set(model.block.attention_layers), set[int]()

    def routed(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        layer_id = getattr(module, "layer_idx", None)
        if layer_id not in wanted:
            return exact_attention(module, query, key, value, attention_mask, **rest)
        for name, what in BLOCKED.items():
            if rest.get(name) is not None:
                raise UnsupportedModel(
                    f"layer {layer_id} of {model.block.id} uses {what}, which is not simulated."
                )
        seen.add(layer_id)
        output = fn(layer_id, query, key, value, Softmax.of_call(query, rest))
        return output.transpose(1, 2).contiguous(), None

    before = model.model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[SCOPE] = routed
    # masks are made for registered names only: without them, sliding-window layers would see
    # everything
    ALL_MASK_ATTENTION_FUNCTIONS.register(SCOPE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.model.set_attn_implementation(SCOPE)
        yield
    finally:
        model.model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[SCOPE]
    if missing := sorted(wanted - seen):
        raise UnsupportedModel(
            f"attention of layers {missing} of {model.block.id} was never reached.",
            hint="its attention code does not use transformers' attention interface",
        )
