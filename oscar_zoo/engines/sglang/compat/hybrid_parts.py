"""Pool and attention backend of the full-attention layers, inside those of a whole model.

For a model whose layers are all alike they are the same objects. For a hybrid model SGLang wraps
them, together with those of its other layers.
"""

from __future__ import annotations

from typing import Any


def full_pool(pool: Any) -> Any:
    """The token pool of the full-attention layers.

    Args:
        pool: `token_to_kv_pool` of a model runner.
    """
    return getattr(pool, "full_kv_pool", pool)


def pool_layers(pool: Any) -> tuple[int, ...]:
    """Global ids of the layers of `full_pool`, in the order of its buffers.

    Args:
        pool: as for `full_pool`.
    """
    places = getattr(pool, "full_attention_layer_id_mapping", None)
    if places is None:
        return tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    return tuple(sorted(places, key=places.__getitem__))


def full_backend(backend: Any) -> Any:
    """The attention backend of the full-attention layers.

    Args:
        backend: `attn_backend` of a model runner.
    """
    return getattr(backend, "full_attn_backend", backend)
