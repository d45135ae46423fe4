"""The part of one worker in a model and a parallel layout: its layers, its heads, its rows, its
rank, and the `CacheConfig` that follows.

A full-attention layer sees every earlier token and keeps a key and a value of each. Other layers
of a hybrid model keep a state, or only the last tokens. They have pools of their own.
"""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang.compat import (
    hybrid_parts,
    radix_attention,
    releases,
    sliding_windows,
)
from oscar_zoo.errors import ServerFailed, UnsupportedModel, UsageError
from oscar_zoo.runtime.engine import CacheConfig
from oscar_zoo.runtime.softmax import Softmax


def max_requests_per_worker(configurator: Any) -> int:
    """`max_running_requests // dp`: request rows of one worker without the padding row."""
    from sglang.srt.runtime_context import get_schedule

    owner = configurator if releases.ATTENTION_DP.here(configurator) else configurator.ps
    dp = owner.attn_dp_size
    return int(get_schedule().max_running_requests) // int(dp)


def longest_request(owner: Any) -> int:
    """Tokens that a row of SGLang's slot table can hold, at most; it has a few more than the
    context.
    """
    return int(owner.model_config.context_len) + 64


def full_layers(model_config: Any) -> tuple[int, ...]:
    """Global ids of the full-attention layers of a model, in ascending order."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    hybrid = mambaish_config(model_config)
    if hybrid is not None:
        return tuple(sorted(hybrid.full_attention_layer_ids))
    split = sliding_windows.split(model_config)
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
    """The full-attention layers of a worker, as SGLang's modules."""
    own = worker_layers(runner)
    return [
        layer for layer in radix_attention.attention_layers(runner.model) if layer.layer_id in own
    ]


def sliding_layers(runner: Any) -> list[Any]:
    """The attention layers of a worker that are not full-attention layers, as SGLang's modules."""
    full = worker_layers(runner)
    return [
        layer
        for layer in radix_attention.attention_layers(runner.model)
        if layer.layer_id not in full
    ]


def cache_config(runner: Any) -> CacheConfig:
    """What the worker of a model runner serves from our token pool."""
    from oscar_zoo.runtime.int2_cache import piece_tokens  # imports kernels: workers only

    pool, own = hybrid_parts.full_pool(runner.token_to_kv_pool), worker_layers(runner)
    built = hybrid_parts.pool_layers(runner.token_to_kv_pool)
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


def attention_ranks() -> int:
    """Number of workers that divide the heads of a layer. With data-parallel attention, or with
    experts of other workers, SGLang pads the requests of a step to a multiple of it."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_size)
