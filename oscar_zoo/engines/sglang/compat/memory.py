"""How SGLang divides memory beside tokens with full attention: states of layers that keep no keys
and values, and slots of layers with a sliding window.

Of some models SGLang keeps the layers with a window in a pool whose slots it frees behind the
window. Of others it keeps every token in every layer and only masks. With an INT2 cache all of them
have the first kind: the second would leave most of the memory to layers that need little of it.
"""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang import sizing
from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.models import geometry

GIB = 1 << 30
"""SGLang counts free memory in these."""


def schedule() -> Any:
    """SGLang's settings of what runs at a time: `max_mamba_cache_size`, the state slots of this
    worker after it divided its memory; `mamba_full_memory_ratio`, memory of states to memory of
    uncompressed tokens; `max_total_tokens`, if the user limited them."""
    from sglang.srt.runtime_context import get_schedule

    return get_schedule()


def decided() -> bool:
    """Whether the number of state slots is not for us to choose. The user named it; or there is no
    prefix cache, and SGLang takes one per request; or there are pipeline stages, whose different
    layers would make different plans, while all of them need one."""
    from sglang.srt.runtime_context import get_memory, get_parallel

    return (
        schedule().max_mamba_cache_size is not None
        or bool(get_memory().disable_radix_cache)
        or int(get_parallel().pp_size) > 1
    )


def choose_slots(configurator: Any, number: int) -> None:
    """Name the state slots of this worker before SGLang divides its memory, as
    `--max-mamba-cache-size` does for all data-parallel workers together."""
    from sglang.srt.runtime_context import get_context

    owner = configurator if releases.ATTENTION_DP.here(configurator) else configurator.ps
    total = number * int(owner.attn_dp_size)
    get_context().override("oscar_int2", max_mamba_cache_size=total)


def per_request(configurator: Any) -> int:
    """State slots of a running request: its own, those that it saves for the prefix cache, and
    those that they replace."""
    return int(configurator._calculate_mamba_ratio())


def split(model_config: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Global ids of the layers with a window and of those with full attention; `None` for a model
    without windows, or with one that covers its context."""
    from sglang.srt.configs import model_config as stock

    text = model_config.hf_text_config
    names = model_config.hf_config.architectures
    if stock.is_hybrid_swa_model(names, text):
        sliding, full = stock.get_hybrid_layer_ids(names, text)
        return None if sliding is None else (tuple(sliding), tuple(full))
    kinds = getattr(text, "layer_types", None) or ()
    if geometry.SLIDING_ATTENTION not in {*kinds} - geometry.full_kinds(text):
        return None
    sliding = [i for i, kind in enumerate(kinds) if kind == geometry.SLIDING_ATTENTION]
    return tuple(sliding), tuple(i for i in range(len(kinds)) if i not in sliding)


def use_two_pools(model_config: Any) -> None:
    found = split(model_config)
    if found is not None:
        model_config.is_hybrid_swa = True
        model_config.is_deepseek_v4_arch = False  # only such a configuration has it
        sliding, full = map(list, found)
        model_config.swa_attention_layer_ids = sliding
        model_config.full_attention_layer_ids = full


def given_ratio() -> float | None:
    """`--swa-full-tokens-ratio`; `None` if the user did not choose one."""
    chosen = schedule()
    if releases.RATIO_GIVEN.here(chosen):
        given = bool(getattr(chosen, releases.RATIO_GIVEN.new))
    else:
        given = chosen.swa_full_tokens_ratio != sizing.SLIDING_RATIO
    return float(chosen.swa_full_tokens_ratio) if given else None


def longest_piece(owner: Any) -> int:
    size = schedule().chunked_prefill_size
    return int(size) if size and size > 0 else int(owner.model_config.context_len)


def sliding_bytes(owner: Any) -> int:
    """Bytes of one token in all layers of a worker that have a window, in the model's dtype."""
    from sglang.srt.runtime_context import get_parallel

    model, span = owner.model_config, owner.layer_info
    found = split(model)
    sliding, _ = found if found is not None else ((), ())
    layers = [i for i in sliding if span.start_layer <= i < span.end_layer]
    heads = model.get_swa_num_kv_heads(get_parallel().attn_tp_size)
    row = model.swa_head_dim + model.swa_v_head_dim
    return int(len(layers) * heads * row * owner.model_dtype.itemsize)


def set_sizes(pools: Any, *, token: float, sliding: float, ratio: float) -> None:
    """Tell SGLang's plan of both pools the bytes of a `token` in all full-attention layers, those
    of a draft model included, and in all layers with a `sliding` window; and the `ratio` of slots
    of the second to those of the first."""
    pools._full_per_token = token / pools._full_layers_num
    pools._swa_per_token = sliding / pools._swa_layers_num
    pools._swa_full_tokens_ratio = ratio
    pools._draft_full_layers_num = pools._draft_swa_layers_num = 0  # counted in `token`
    pools._cell_size = token + ratio * sliding
