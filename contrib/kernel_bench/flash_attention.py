"""FlashAttention-3, as vLLM ships and calls it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from flashinfer_kernels import page_table, paged
from plain_rows import Calls, Rows


class FlashAttention3:
    """Over 16-bit pages of `PAGE` tokens in random order; the number of splits is its own choice.

    Args:
        library: `vllm.vllm_flash_attn`.
    """

    name, element_bytes = "fa3-bf16", 2

    def __init__(self, library: Any) -> None:
        self._attend = library.flash_attn_varlen_func

    def decode(self, rows: Rows) -> Calls:
        """See `DecodeBaseline`."""
        table, lengths = page_table(rows)
        call = partial(
            self._attend,
            q=rows.query,
            max_seqlen_q=1,
            cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda"),
            max_seqlen_k=rows.lengths[0],
            seqused_k=lengths,
            block_table=table,
            softmax_scale=rows.query.shape[-1] ** -0.5,
            causal=True,
            out=torch.empty_like(rows.query),
            fa_version=3,
        )
        return [
            partial(call, k=key, v=value)
            for key, value in ([paged(x, rows, table) for x in one] for one in rows.layers)
        ]
