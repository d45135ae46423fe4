"""Compiles what FlashInfer would compile for `bench serve` at its first use, more than a minute,
beside other steps.

FlashInfer keeps the result and takes a lock while it compiles, so nothing else changes.
"""

import torch
from flashinfer.jit.attention.modules import gen_batch_prefill_module

HEAD_DIM = 128
"""Of Qwen3-8B, whose shape `bench serve` has."""


def compile_attention(backend: str, cache: torch.dtype) -> None:
    """Compile the kernels of `backend` that read a cache of this type for queries in BF16."""
    dtypes = (torch.bfloat16, cache, torch.bfloat16, torch.int32)
    gen_batch_prefill_module(
        backend, *dtypes, HEAD_DIM, HEAD_DIM, 0, False, False, False
    ).build_and_load()


if torch.cuda.get_device_capability() == (9, 0):
    compile_attention("fa3", torch.bfloat16)
compile_attention("fa2", torch.float8_e4m3fn)  # also decodes; FA3 takes no such cache
