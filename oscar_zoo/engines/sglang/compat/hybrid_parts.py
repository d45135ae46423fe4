"""Pool and attention backend of the full-attention layers, inside those of a whole model.

For a model whose layers are all alike they are the same objects. For a hybrid model SGLang wraps
them, together with those of its other layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oscar_zoo.engines.sglang.compat import radix_attention

SLIDING = "SWA"
"""What SGLang calls the pool of layers with a sliding window where it makes both."""


def full_pool(pool: Any) -> Any:
    """The token pool of the full-attention layers."""
    return getattr(pool, "full_kv_pool", pool)


def pool_layers(pool: Any) -> tuple[int, ...]:
    """Global ids of the layers of `full_pool`, in the order of its buffers."""
    places = getattr(pool, "full_attention_layer_id_mapping", None)
    if sliding_pool(pool) is not None:
        mapped = pool.layers_mapping.items()
        places = {layer: place for layer, (place, sliding) in mapped if not sliding}
    if places is None:
        return tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    return tuple(sorted(places, key=places.__getitem__))


def sliding_pool(pool: Any) -> Any | None:
    """The stock pool of the layers with a sliding window; `None` for a model without them."""
    return getattr(pool, "swa_kv_pool", None)


def either_pool(make: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """What SGLang may call for each part of a pool, in place of the class of its stock pool.

    Args:
        dtype: of the tokens of layers with a sliding window.
    """

    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("allocation_label") != SLIDING:
            return make(*args, **kwargs)
        return radix_attention.token_pool_class()(*args, **{**kwargs, "dtype": dtype})

    return made


def full_backend(backend: Any) -> Any:
    """The attention backend of the full-attention layers."""
    return getattr(backend, "full_attn_backend", backend)
