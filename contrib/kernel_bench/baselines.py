"""The same attention over unquantized and FP8 rows, by kernels that others wrote: FlashAttention-3,
those of FlashInfer, or else PyTorch's own.

Caches are as SGLang keeps them for each kernel. Kernels plan their splits before the clock starts.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import cases
import torch
from flash_attention import FlashAttention3
from flashinfer_kernels import FlashInfer, Xqa
from plain_rows import Baseline, Calls, DecodeBaseline, Rows, rows
from roofline import Heads
from torch import Tensor

from oscar_kernels.reference import attend

ATOL = {1: 0.15, 2: 0.03, 4: 0.03}
"""Absolute tolerance for outputs of size one, by the bytes of an element of the cache."""


def available() -> Baseline:
    """FlashInfer over 16-bit rows if it is installed and there is a GPU, else PyTorch."""
    return FlashInfer(_flashinfer()) if _has("flashinfer") else Sdpa()


def decoders() -> list[DecodeBaseline]:
    """Everything that a user could decode with instead; XQA needs compute capability 9, and
    FlashAttention-3 an environment with vLLM."""
    found: list[DecodeBaseline] = []
    if _has("vllm"):
        found.append(FlashAttention3(importlib.import_module("vllm.vllm_flash_attn")))
    if _has("flashinfer"):
        library, types = _flashinfer(), (torch.bfloat16, torch.float8_e4m3fn)
        found += [FlashInfer(library, dtype) for dtype in types]
        if torch.cuda.get_device_capability() >= (9, 0):
            found += [Xqa(library, dtype) for dtype in types]
    return found or [Sdpa()]


def _has(name: str) -> bool:
    return cases.DEVICE == "cuda" and importlib.util.find_spec(name) is not None


def _flashinfer() -> Any:
    return importlib.import_module("flashinfer")


def check_decode(heads: Heads, baseline: DecodeBaseline) -> None:
    """Check decode attention against the reference on the same rows."""
    made = rows(heads, [333] * 3, 1)
    key, value = (x[made.slots.long()].split(made.lengths) for x in made.layers[0])
    scale = heads.k_spec.head_dim**-0.5
    want = torch.cat(
        [
            attend(made.query[b : b + 1].float(), key[b].float(), value[b].float(), scale, 0.0)[0]
            for b in range(3)
        ]
    )
    _close("decode", baseline, baseline.decode(made)[0](), want)


def check_extend(heads: Heads, baseline: Baseline) -> None:
    """Check an extend against the reference on the same rows."""
    scale = heads.k_spec.head_dim**-0.5
    made = rows(heads, [333], 1, new=16)
    want = attend(
        made.query.float(), made.layers[0][0].float(), made.layers[0][1].float(), scale, 0.0
    )[0]
    _close("extend", baseline, baseline.extend(made)[0](), want)


def _close(what: str, baseline: DecodeBaseline, got: Tensor, want: Tensor) -> None:
    error = (got.float() - want).abs().max().item()
    assert error < ATOL[baseline.element_bytes], f"{what} of {baseline.name} is off by {error:.2g}"


class Sdpa:
    """PyTorch's scaled dot product over contiguous rows without pages, for machines without
    FlashInfer."""

    name = "torch-sdpa"
    element_bytes = cases.DTYPE.itemsize

    def decode(self, rows: Rows) -> Calls:
        """See `Baseline`."""
        number, length = len(rows.lengths), rows.lengths[0]
        query = rows.query.unsqueeze(2)

        def call(key: Tensor, value: Tensor) -> Tensor:
            return _sdpa(query, key, value).squeeze(2)

        return [
            partial(
                call,
                *(
                    x[rows.slots.long()].unflatten(0, (number, length)).transpose(1, 2).contiguous()
                    for x in layer
                ),
            )
            for layer in rows.layers
        ]

    def extend(self, rows: Rows) -> Calls:
        """See `Baseline`; a mask makes it causal."""
        query = rows.query.transpose(0, 1).unsqueeze(0)
        new, length = query.shape[2], rows.lengths[0]
        mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)

        def call(key: Tensor, value: Tensor) -> Tensor:
            return _sdpa(query, key, value, mask).squeeze(0).transpose(0, 1)

        return [
            partial(call, *(x.contiguous() for x in _heads_first(*layer))) for layer in rows.layers
        ]

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> object:
        """See `Baseline`."""
        q, k, v = _heads_first(query, key, value)
        return _sdpa(q, k, v)

    def chunk(self, query: Tensor, key: Tensor, value: Tensor) -> object:
        """See `Baseline`."""
        mask = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device).tril()
        q, k, v = _heads_first(query, key, value)
        return _sdpa(q, k, v, mask)


def _heads_first(*rows: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).unsqueeze(0) for x in rows]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
