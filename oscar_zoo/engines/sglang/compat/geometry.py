"""The part of one worker in a model and a parallel layout: its heads, its rows, its rank, and the
`CacheConfig` that follows."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang.compat import radix_attention, releases
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.runtime.engine import CacheConfig


def max_requests_per_worker(configurator: Any) -> int:
    """`max_running_requests // dp`: request rows of one worker without the padding row."""
    from sglang.srt.runtime_context import get_schedule

    owner = configurator if releases.ATTENTION_DP.here(configurator) else configurator.ps
    dp = owner.attn_dp_size
    return int(get_schedule().max_running_requests) // int(dp)


def longest_request(owner: Any) -> int:
    """Tokens that a row of SGLang's slot table can hold, at most; it has a few more than the
    context.

    Args:
        owner: model runner or pool configurator.
    """
    return int(owner.model_config.context_len) + 64


def cache_config(runner: Any, pool: Any) -> CacheConfig:
    """What the worker of a model runner serves from our token pool.

    Raises:
        UnsupportedModel: attention layers that differ in the factor of their logits.
    """
    from oscar_zoo.runtime.int2_cache import piece_tokens  # imports kernels: workers only

    layers = list(radix_attention.attention_layers(runner.model))
    scales = {float(layer.scaling) for layer in layers}
    if len(scales) != 1:
        raise UnsupportedModel(
            f"attention layers with different scaling ({sorted(scales)}) are not served."
        )
    return CacheConfig(
        layer_ids=range(pool.start_layer, pool.start_layer + pool.layer_num),
        num_q_heads=layers[0].tp_q_head_num,
        sm_scale=scales.pop(),
        max_batch=pool.windows.shape.num_rows,
        max_tokens=longest_request(runner),
        piece_tokens=piece_tokens(pool.device),
        device=pool.device,
    )


def context_length(runner: Any) -> int:
    """Longest request the model is served for, in tokens, prompt and answer together."""
    return int(runner.model_config.context_len)


def local_kv_heads(model_config: Any) -> range:
    """Global ids of the KV heads of this worker; with fewer heads than workers, heads are
    replicated."""
    from sglang.srt.runtime_context import get_parallel

    size, rank = get_parallel().attn_tp_size, get_parallel().attn_tp_rank
    total, own = model_config.get_total_num_kv_heads(), model_config.get_num_kv_heads(size)
    start = rank * total // size
    return range(start, start + own)


def local_q_heads(model_config: Any) -> int:
    """Number of query heads of this worker."""
    from sglang.srt.runtime_context import get_parallel

    return int(model_config.num_attention_heads) // int(get_parallel().attn_tp_size)


def has_linear_layers(model_config: Any) -> bool:
    """Whether some layers keep a state in place of keys and values."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def rank_name() -> str:
    """Name of this worker among those that hold one copy of the model."""
    from sglang.srt.runtime_context import get_parallel

    return f"pp{get_parallel().pp_rank}-tp{get_parallel().tp_rank}"
