"""SGLang's attention: its layers, the classes that our backend and pool derive from, and what a
layer hands to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def attention_layers(model: Any) -> Iterator[Any]:
    """Every attention layer of a loaded model.

    Where SGLang has no code for an architecture it runs that of transformers, and keeps its own
    attention layers in a table beside the modules.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        if isinstance(module, RadixAttention):
            yield module
        yield from getattr(module, "attention_instances", {}).values()


def attention_backend_class() -> Any:
    """The base class of attention backends."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    return AttentionBackend


def token_pool_class() -> Any:
    """The stock pool of keys and values."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool


def write_location(loc_info: Any) -> Any:
    """Slot ids of a write, whichever of SGLang's types carries them."""
    from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

    return unwrap_write_loc(loc_info)[0]


def write_both(pool: Any, layer: Any, out_loc: Any, k: Any, v: Any) -> None:
    """Write keys and values of a layer into that half of a pair of pools that it belongs to.

    Args:
        out_loc: slot ids of the first half, one per token.
        k, v: `[tokens, heads, head_dim]`.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    loc = KVWriteLoc(out_loc, pool.translate_loc_from_full_to_swa(out_loc))
    pool.set_kv_buffer(layer, loc, k, v)
