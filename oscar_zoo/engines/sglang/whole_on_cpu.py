"""Attention over a whole sequence on a CPU, for layers that SGLang's own backend there computes
wrongly.

That backend knows neither learned sinks nor a cap of the logits. Calibration runs every sequence
alone and in one piece, so attention needs nothing but its rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oscar_zoo.models.softmax import Softmax, attend


def softmax_of(layer: Any, sinks: Tensor | None) -> Softmax:
    """The softmax of one of SGLang's attention layers.

    Args:
        layer: SGLang's module.
        sinks: `[heads]` of this worker, as the model hands them over.
    """
    wide = None if sinks is None else sinks.detach().float()
    return Softmax(float(layer.scaling), layer.logit_cap or None, wide)


def attention_on_cpu(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, sinks: Tensor | None
) -> Tensor | None:
    """Attention of one sequence in one layer; `None` where SGLang's own is right.

    Args:
        layer: SGLang's module.
        q, k, v: rows of the local heads after RoPE, tokens first.
        forward_batch: SGLang's, of a prefill.
        sinks: as of `softmax_of`.

    Returns:
        `[tokens, heads * v_head_dim]`.
    """
    alone = list(forward_batch.extend_prefix_lens_cpu) == [0]
    if q.device.type != "cpu" or k is None or v is None or not alone:
        return None
    softmax, window = softmax_of(layer, sinks), layer.sliding_window_size or 0
    if softmax.plain and window <= 0:
        return None
    query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).transpose(0, 1)
    key = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim).transpose(0, 1)
    value = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim).transpose(0, 1)
    asking = torch.arange(query.shape[1], device=q.device)[:, None]
    seen = torch.arange(key.shape[1], device=q.device)
    mask = seen <= asking
    if window > 0:
        mask &= seen >= asking - window
    out = attend(query[None], key[None], value[None], mask, softmax)
    return out[0].transpose(0, 1).flatten(1)
