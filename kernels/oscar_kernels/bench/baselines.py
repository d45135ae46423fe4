"""The same attention over 16-bit rows, by kernels that others wrote: FlashInfer, or else PyTorch's
own.

Caches are as SGLang keeps them, a page per token in random order. FlashInfer plans its splits
before the clock starts.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from oscar_kernels.bench import cases
from oscar_kernels.bench.roofline import Heads
from oscar_kernels.decode_attention.reference import attend

WORKSPACE_BYTES = 384 << 20
ATOL = 0.03
"""Absolute tolerance for outputs of size one, in bfloat16."""

Calls = list[Callable[[], Tensor]]


@dataclass(frozen=True)
class Rows:
    """16-bit K and V of several layers, and one batch of them.

    Attributes:
        query: `[tokens, Hq, D]`.
        layers: K and V of each, `[slots, H, D]`.
        slots: of all requests, packed; int32.
        lengths: of the requests, all equal.
    """

    query: Tensor
    layers: list[tuple[Tensor, Tensor]]
    slots: Tensor
    lengths: list[int]


class Baseline(Protocol):
    """Attention over 16-bit rows, with one call per layer that only launches kernels."""

    name: str

    def decode(self, rows: Rows) -> Calls:
        """One query token per request."""

    def extend(self, rows: Rows) -> Calls:
        """One request, whose query rows belong to its last tokens; its rows lie in order."""

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> object:
        """Attention of all of the query over all rows, with its log-sum-exp if the kernel gives
        one."""

    def chunk(self, query: Tensor, key: Tensor, value: Tensor) -> object:
        """Causal attention of new tokens over themselves; results as for `whole`."""


def available() -> Baseline:
    """FlashInfer if it is installed and there is a GPU, else PyTorch."""
    if cases.DEVICE == "cuda" and importlib.util.find_spec("flashinfer"):
        return FlashInfer(importlib.import_module("flashinfer"))
    return Sdpa()


def rows(heads: Heads, lengths: list[int], count: int, *, new: int = 1) -> Rows:
    """Rows of `count` layers for requests with `lengths` tokens in random slots, and the queries of
    `new` tokens of each request."""
    tokens, dim = sum(lengths), heads.k_spec.head_dim
    layers = [
        (
            cases.normal(tokens, heads.num_kv_heads, dim),
            cases.normal(tokens, heads.num_kv_heads, dim),
        )
        for _ in range(count)
    ]
    slots = torch.randperm(tokens, device=cases.DEVICE).int()
    return Rows(
        cases.normal(new * len(lengths), heads.num_kv_heads * heads.group, dim),
        layers,
        slots,
        lengths,
    )


def check(heads: Heads, baseline: Baseline) -> None:
    """Check both kinds of attention against the reference on the same rows.

    Raises:
        AssertionError: they are not.
    """
    made = rows(heads, [333] * 3, 1)
    key, value = (x[made.slots.long()].split(made.lengths) for x in made.layers[0])
    scale = heads.k_spec.head_dim**-0.5
    want = torch.cat(
        [
            attend(made.query[b : b + 1].float(), key[b].float(), value[b].float(), scale, 0.0)[0]
            for b in range(3)
        ]
    )
    _close("decode", baseline.decode(made)[0](), want)
    made = rows(heads, [333], 1, new=16)
    want = attend(
        made.query.float(), made.layers[0][0].float(), made.layers[0][1].float(), scale, 0.0
    )[0]
    _close("extend", baseline.extend(made)[0](), want)


def _close(what: str, got: Tensor, want: Tensor) -> None:
    error = (got.float() - want).abs().max().item()
    assert error < ATOL, f"{what} of the baseline is off by {error:.2g}"


class FlashInfer:
    """FlashInfer's paged decode kernel on tensor cores, and its prefill kernel for one request.

    Args:
        library: the module `flashinfer`.
    """

    name = "flashinfer-bf16"

    def __init__(self, library: Any) -> None:
        self._library = library
        self._scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def decode(self, rows: Rows) -> Calls:
        """See `Baseline`; the calls are prepared for CUDA graphs as in SGLang."""
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
            kv_data_type=torch.bfloat16,
        )
        out = torch.empty_like(rows.query)
        return [
            partial(wrapper.run, rows.query, (key.unsqueeze(1), value.unsqueeze(1)), out=out)
            for key, value in rows.layers
        ]

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


class Sdpa:
    """PyTorch's scaled dot product over contiguous rows without pages, for machines without
    FlashInfer."""

    name = "torch-sdpa"

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
