"""Rows of a cache that is not quantized, and what attends to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import cases
import torch
from roofline import Heads
from torch import Tensor

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


class DecodeBaseline(Protocol):
    """Decode attention, with one call per layer that only launches kernels.

    Attributes:
        name: of the kernel and the type of its cache.
        element_bytes: of an element of the cache.
    """

    name: str
    element_bytes: int

    def decode(self, rows: Rows) -> Calls:
        """One query token per request."""


class Baseline(DecodeBaseline, Protocol):
    """All kinds of attention over 16-bit rows."""

    def extend(self, rows: Rows) -> Calls:
        """One request, whose query rows belong to its last tokens; its rows lie in order."""

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> object:
        """Attention of all of the query over all rows, with its log-sum-exp if the kernel gives
        one."""

    def chunk(self, query: Tensor, key: Tensor, value: Tensor) -> object:
        """Causal attention of new tokens over themselves; results as for `whole`."""


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
