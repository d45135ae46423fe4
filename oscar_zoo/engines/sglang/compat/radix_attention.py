"""SGLang's attention: its layers, the classes that our backend and pool derive from, and what a
layer hands to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oscar_zoo.errors import UnsupportedModel

ATTENTION_ARGUMENTS = frozenset({"save_kv_cache", "key_value_num_tokens", "sinks"})
"""Optional arguments of `RadixAttention.forward` that ask for nothing that `Softmax` does not
know."""


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
        pool: with full-attention layers in one half, and layers with a sliding window in the other.
        layer: SGLang's module.
        out_loc: slot ids of the first half, one per token.
        k, v: `[tokens, heads, head_dim]`.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    loc = KVWriteLoc(out_loc, pool.translate_loc_from_full_to_swa(out_loc))
    pool.set_kv_buffer(layer, loc, k, v)


def capturing() -> bool:
    """Whether the current forward pass is being recorded into a CUDA graph."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return bool(get_is_capture_mode())


def output_projection(model: Any, attention: Any, dtype: Any) -> Any:
    """Weight of the linear layer that reads the output of `attention`,
    `[hidden, heads * v_head_dim]` of this worker.

    Read by pushing the identity through the layer's own kernel, so that quantized weights need no
    code of ours.

    Args:
        model: that holds `attention`.
        dtype: of the activations.

    Raises:
        UnsupportedModel: there is no such layer beside `attention`, or more than one.
    """
    import torch
    from sglang.srt.layers.linear import RowParallelLinear

    width = attention.tp_q_head_num * attention.v_head_dim
    owner = next(
        module
        for module in model.modules()
        if any(child is attention for child in module.children())
    )
    found = [
        child
        for child in owner.children()
        if isinstance(child, RowParallelLinear) and child.input_size_per_partition == width
    ]
    if len(found) != 1:
        raise UnsupportedModel(
            f"layer {attention.layer_id}: {len(found)} linear layers of {type(owner).__name__}"
            " could be o_proj.",
            hint="calibrate with a method that does not use o_proj, such as oscar",
        )
    identity = torch.eye(width, dtype=dtype, device=next(found[0].parameters()).device)
    return found[0].quant_method.apply(found[0], identity, None).T
