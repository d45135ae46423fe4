"""Compiles what FlashInfer would compile for `bench serve` at its first use, more than a minute,
beside other steps.

FlashInfer keeps the result and takes a lock while it compiles, so nothing else changes.
"""

from __future__ import annotations

import torch
from flashinfer.jit.attention.modules import gen_batch_prefill_module

HEAD_DIM = 128
"""Of Qwen3-8B, whose shape `bench serve` has."""

if torch.cuda.get_device_capability() == (9, 0):
    dtypes = (torch.bfloat16,) * 3 + (torch.int32,)
    gen_batch_prefill_module(
        "fa3", *dtypes, HEAD_DIM, HEAD_DIM, 0, False, False, False
    ).build_and_load()
