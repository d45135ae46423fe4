"""The part of one worker in a model and a parallel layout: its layers, heads, rows and rank, the
`CacheConfig` that follows, and where SGLang keeps pool and backend of its full-attention layers.

A full-attention layer sees every earlier token and keeps a key and a value of each. Other layers
of a hybrid model keep a state, or only the last tokens. They have pools of their own, and SGLang
wraps both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oscar_zoo.engines.sglang.compat import memory, releases
from oscar_zoo.errors import ServerFailed, UnsupportedModel, UsageError
from oscar_zoo.runtime.engine import CacheConfig, Softmax

SLIDING = "SWA"
"""What SGLang calls the pool of layers with a sliding window where it makes both."""


def max_requests_per_worker(configurator: Any) -> int:
    """`max_running_requests // dp`: request rows of one worker without the padding row."""
    from sglang.srt.runtime_context import get_schedule

    owner = configurator if releases.ATTENTION_DP.here(configurator) else configurator.ps
    dp = owner.attn_dp_size
    return int(get_schedule().max_running_requests) // int(dp)


def longest_request(owner: Any) -> int:
    """Tokens that a row of SGLang's slot table can hold, at most; it has a few more than the
    context."""
    return int(owner.model_config.context_len) + 64


def full_layers(model_config: Any) -> tuple[int, ...]:
    """Global ids of the full-attention layers of a model, in ascending order."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    hybrid = mambaish_config(model_config)
    if hybrid is not None:
        return tuple(sorted(hybrid.full_attention_layer_ids))
    split = memory.split(model_config)
    return tuple(range(model_config.num_hidden_layers)) if split is None else split[1]


def other_layers(model_config: Any) -> str | None:
    """What the layers of a model keep beside full attention: `states` or `windows`, or `None`.
    Every layer of Falcon-H1 has both attention and a state."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if mambaish_config(model_config) is not None:
        return "states"
    windowed = len(full_layers(model_config)) < int(model_config.num_hidden_layers)
    return "windows" if windowed else None


def worker_layers(owner: Any) -> tuple[int, ...]:
    """Those of `full_layers` that a worker holds; with pipeline parallelism a part of them."""
    span = owner.layer_info
    layers = full_layers(owner.model_config)
    own = tuple(i for i in layers if span.start_layer <= i < span.end_layer)
    if not own:
        raise UsageError(
            f"layers {span.start_layer} .. {span.end_layer - 1} of this model have no full"
            " attention, so one of the pipeline stages would have no INT2 KV cache.",
            hint="use fewer pipeline stages: --pp-size",
        )
    return own


def full_attention_layers(runner: Any) -> list[Any]:
    own = worker_layers(runner)
    return [layer for layer in attention_layers(runner.model) if layer.layer_id in own]


def sliding_layers(runner: Any) -> list[Any]:
    full = worker_layers(runner)
    return [layer for layer in attention_layers(runner.model) if layer.layer_id not in full]


def cache_config(runner: Any) -> CacheConfig:
    from oscar_zoo.runtime.int2_cache import piece_tokens  # imports kernels: workers only

    pool, own = full_pool(runner.token_to_kv_pool), worker_layers(runner)
    built = pool_layers(runner.token_to_kv_pool)
    if built != own:
        raise ServerFailed(f"SGLang built a pool for layers {built}, the INT2 cache is for {own}.")
    layers = full_attention_layers(runner)
    logits = {(float(layer.scaling), float(layer.logit_cap or 0.0)) for layer in layers}
    if len(logits) != 1:
        raise UnsupportedModel(
            f"attention layers with different scaling or caps ({sorted(logits)}) are not served."
        )
    return CacheConfig(
        layer_ids=own,
        num_q_heads=layers[0].tp_q_head_num,
        softmax=Softmax(*logits.pop()),
        max_batch=pool.windows.shape.max_batch,
        max_tokens=longest_request(runner),
        piece_tokens=piece_tokens(pool.device),
        device=pool.device,
    )


def context_length(runner: Any) -> int:
    return int(runner.model_config.context_len)


def is_latent(model_config: Any) -> bool:
    return getattr(getattr(model_config, "attention_arch", None), "name", "") == "MLA"


def row_dims(model_config: Any) -> tuple[int, int]:
    """Channels of a row of K and of V; with latents, of a latent and of its rotary key."""
    if is_latent(model_config):
        return int(model_config.kv_lora_rank), int(model_config.qk_rope_head_dim)
    return int(model_config.head_dim), int(model_config.v_head_dim)


def kv_heads(model_config: Any) -> int:
    """KV heads of the whole model."""
    return 1 if is_latent(model_config) else int(model_config.get_total_num_kv_heads())


def local_kv_heads(model_config: Any) -> range:
    """Global ids of the KV heads of this worker; with fewer heads than workers, heads are
    replicated."""
    from sglang.srt.runtime_context import get_parallel

    if is_latent(model_config):
        return range(1)

    size, rank = get_parallel().attn_tp_size, get_parallel().attn_tp_rank
    total, own = model_config.get_total_num_kv_heads(), model_config.get_num_kv_heads(size)
    start = rank * total // size
    return range(start, start + own)


def local_q_heads(model_config: Any) -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(model_config.num_attention_heads) // int(get_parallel().attn_tp_size)


def attention_ranks() -> int:
    """Number of workers that divide the heads of a layer. With data-parallel attention, or with
    experts of other workers, SGLang pads the requests of a step to a multiple of it."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_size)


def attention_layers(model: Any) -> Iterator[Any]:
    """Every attention layer of a loaded model. Where SGLang has no code for an architecture it runs
    that of transformers, and keeps its own attention layers in a table beside the modules."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        if isinstance(module, RadixAttention):
            yield module
        yield from getattr(module, "attention_instances", {}).values()


def attention_backend_class() -> Any:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    return AttentionBackend


def token_pool_class() -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool


def write_location(loc_info: Any) -> Any:
    """Slot ids of a write, whichever of SGLang's types carries them."""
    from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

    return unwrap_write_loc(loc_info)[0]


def write_both(pool: Any, layer: Any, out_loc: Any, k: Any, v: Any) -> None:
    """Write keys and values of a layer, `[tokens, heads, head_dim]`, into that half of a pair of
    pools that it belongs to. `out_loc`: slot ids of the first half, one per token."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    loc = KVWriteLoc(out_loc, pool.translate_loc_from_full_to_swa(out_loc))
    pool.set_kv_buffer(layer, loc, k, v)


def full_pool(pool: Any) -> Any:
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


def build_latents(
    build: Callable[..., Any], owner: Any, make: Callable[..., Any], **asked: Any
) -> Any:
    """Call SGLang's function that builds a pool of latents, and have it call `make` in place of the
    class of its stock pool, with what that of keys and values is called with."""

    def made(*args: Any, kv_lora_rank: int, qk_rope_head_dim: int, **kwargs: Any) -> Any:
        dims = {"head_num": 1, "head_dim": kv_lora_rank, "v_head_dim": qk_rope_head_dim}
        return make(*args, **dims, **kwargs)

    if releases.LATENT_POOL.new in asked:
        return build(owner, **{**asked, releases.LATENT_POOL.new: made})
    with replaced(sys.modules[build.__module__], **{str(releases.LATENT_POOL.old): made}):
        return build(owner, **asked)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def either_pool(make: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """What SGLang may call for each part of a pool, in place of the class of its stock pool."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("allocation_label") != SLIDING:
            return make(*args, **kwargs)
        return token_pool_class()(*args, **{**kwargs, "dtype": dtype})

    return made
