"""Kernels of FlashInfer, over 16-bit and FP8 caches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from plain_rows import Calls, Rows
from torch import Tensor

WORKSPACE_BYTES = 384 << 20
NAMES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
PAGE = 64
"""Tokens of a page of XQA, as in SGLang."""


class FlashInfer:
    """FlashInfer's paged decode kernel on tensor cores, and its prefill kernel for one request.

    Args:
        dtype: of the cache, bfloat16 or float8_e4m3fn; prefill is for bfloat16 only.
    """

    def __init__(self, library: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self.name, self.element_bytes = f"flashinfer-{NAMES[dtype]}", dtype.itemsize
        self._library, self._dtype = library, dtype
        self._scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def decode(self, rows: Rows) -> Calls:
        """See `DecodeBaseline`; a page per token in random order, prepared for CUDA graphs as in
        SGLang."""
        number, (_, q_heads, dim) = len(rows.lengths), rows.query.shape
        indptr = torch.tensor([0, *rows.lengths], device="cuda").cumsum(0).int()
        last = torch.ones(number, dtype=torch.int32, device="cuda")
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._scratch,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty_like(indptr),
            paged_kv_indices_buffer=torch.empty_like(rows.slots),
            paged_kv_last_page_len_buffer=torch.empty_like(last),
        )
        wrapper.plan(
            indptr,
            rows.slots,
            last,
            q_heads,
            rows.layers[0][0].shape[1],
            dim,
            1,
            q_data_type=torch.bfloat16,
            kv_data_type=self._dtype,
        )
        out = torch.empty_like(rows.query)
        caches = [
            tuple(x.to(self._dtype).unsqueeze(1) for x in (key, value))
            for key, value in rows.layers
        ]
        return [partial(wrapper.run, rows.query, layer, out=out) for layer in caches]

    def extend(self, rows: Rows) -> Calls:
        """See `Baseline`."""
        run = self._library.single_prefill_with_kv_cache
        return [partial(run, rows.query, key, value, causal=True) for key, value in rows.layers]

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> object:
        """See `Baseline`."""
        return self._library.single_prefill_with_kv_cache(
            query, key, value, causal=False, return_lse=True
        )

    def chunk(self, query: Tensor, key: Tensor, value: Tensor) -> object:
        """See `Baseline`."""
        return self._library.single_prefill_with_kv_cache(
            query, key, value, causal=True, return_lse=True
        )


class Xqa:
    """The decode kernel XQA as FlashInfer ships it, over pages of `PAGE` tokens in random order.

    Args:
        dtype: of the cache, bfloat16 or float8_e4m3fn.
    """

    def __init__(self, library: Any, dtype: torch.dtype) -> None:
        self.name, self.element_bytes = f"xqa-{NAMES[dtype]}", dtype.itemsize
        self._library, self._dtype = library, dtype
        self._scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def decode(self, rows: Rows) -> Calls:
        """See `DecodeBaseline`."""
        table, lengths = page_table(rows)
        out = torch.empty_like(rows.query)
        return [
            partial(
                self._library.decode.trtllm_batch_decode_with_kv_cache,
                rows.query,
                tuple(paged(x.to(self._dtype), rows, table) for x in layer),
                self._scratch,
                table,
                lengths,
                rows.lengths[0],
                bmm1_scale=rows.query.shape[-1] ** -0.5,
                bmm2_scale=1.0,
                out=out,
                kv_layout="NHD",
                backend="xqa",
            )
            for layer in rows.layers
        ]


def page_table(rows: Rows) -> tuple[Tensor, Tensor]:
    """Pages of each request, `[requests, pages]` in random order, and lengths; int32."""
    number, pages = len(rows.lengths), -(-rows.lengths[0] // PAGE)
    table = torch.randperm(number * pages, device="cuda").int().view(number, pages)
    return table, torch.tensor(rows.lengths, dtype=torch.int32, device="cuda")


def paged(x: Tensor, rows: Rows, table: Tensor) -> Tensor:
    """`[pages, PAGE, H, D]` of rows `[slots, H, D]`."""
    number, pages = table.shape
    found = x.new_zeros(number * pages, PAGE, *x.shape[1:])
    for request, own in enumerate(rows.slots.long().view(number, -1)):
        padded = x.new_zeros(pages * PAGE, *x.shape[1:])
        padded.view(torch.uint8)[: len(own)] = x.view(torch.uint8)[own]
        found[table[request].long()] = padded.view(pages, PAGE, *x.shape[1:])
    return found
