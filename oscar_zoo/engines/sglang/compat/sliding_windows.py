"""Layers with a sliding window in SGLang: which ones a model has, and the pool of their own.

Of some models SGLang keeps these layers in a pool whose slots it frees behind the window. Of others
it keeps every token in every layer and only masks. With an INT2 cache all of them have the first
kind: the second would leave most of the memory to layers that need little of it.
"""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.models import geometry

STOCK_RATIO = 0.8
"""SGLang's own `--swa-full-tokens-ratio`."""


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
    windowed = [kind == geometry.SLIDING_ATTENTION for kind in kinds]
    return _places(windowed, True), _places(windowed, False)


def use_two_pools(model_config: Any) -> None:
    """Have SGLang keep the layers with a window in a pool of their own."""
    found = split(model_config)
    if found is not None:
        model_config.is_hybrid_swa = True
        model_config.is_deepseek_v4_arch = False  # only such a configuration has it
        sliding, full = map(list, found)
        model_config.swa_attention_layer_ids = sliding
        model_config.full_attention_layer_ids = full


def given_ratio() -> float | None:
    """`--swa-full-tokens-ratio`; `None` if the user did not choose one."""
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    if releases.RATIO_GIVEN.here(schedule):
        given = bool(getattr(schedule, releases.RATIO_GIVEN.new))
    else:
        given = schedule.swa_full_tokens_ratio != STOCK_RATIO
    return float(schedule.swa_full_tokens_ratio) if given else None


def longest_piece(owner: Any) -> int:
    """Tokens that one forward pass adds to a request, at most."""
    from sglang.srt.runtime_context import get_schedule

    size = get_schedule().chunked_prefill_size
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
    """Tell SGLang's plan of both pools what slots take.

    Args:
        token: bytes of a token in all full-attention layers, those of a draft model included.
        sliding: bytes of a token in all layers with a window.
        ratio: slots of the second to those of the first.
    """
    pools._full_per_token = token / pools._full_layers_num
    pools._swa_per_token = sliding / pools._swa_layers_num
    pools._swa_full_tokens_ratio = ratio
    pools._draft_full_layers_num = pools._draft_swa_layers_num = 0  # counted in `token`
    pools._cell_size = token + ratio * sliding


def _places(values: list[bool], wanted: bool) -> tuple[int, ...]:
    return tuple(i for i, value in enumerate(values) if value is wanted)
