"""Which rows of a cache a query reads, and in which form: exact, or as they are stored.

A cache is simulated through the two protocols of this file. `SimulatedCache` asks one for its sides
and for what queries read; it knows nothing else of a method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry, Windows

WINDOW, STORED = 0, 1
"""Forms of a row: as it is in a high-precision window, and after it was quantized."""
Stretches = tuple[tuple[int, int, int], ...]
"""Rows to read, in order: `(WINDOW or STORED, first position, end position)`."""


@dataclass(frozen=True)
class Reads:
    """Rows that queries at consecutive positions may read.

    Attributes:
        k: rows of keys.
        v: as many rows of values, of the same positions.
        mask: `[T, R]` bool, true where a query reads a row.
    """

    k: Stretches
    v: Stretches
    mask: Tensor


class StoredSide(Protocol):
    """Keys or values of one layer, on their way into a cache.

    Attributes:
        partner: `[d, d]` or `[num_kv_heads, d, d]`, applied to queries or outputs; `None` for none.
        mean: what was taken from the rows, `[1 or num_kv_heads, 1, d]`; `None` for nothing.
    """

    @property
    def partner(self) -> Tensor | None: ...
    @property
    def mean(self) -> Tensor | None: ...

    def rows(self, x: Tensor) -> Tensor:
        """What the cache is given, float32: `[B, num_kv_heads, T, d]`."""

    def stored(self, rows: Tensor) -> Tensor:
        """What a query reads of such rows, float32, same shape. Row `s` belongs to position `s`
        where a method depends on positions."""


class Simulated(Protocol):
    """A cache that `SimulatedCache` can simulate."""

    def check(self, model: Geometry) -> None:
        """Refuse a model that it does not fit; raises `GeometryMismatch` and `UsageError`."""

    def sides(
        self, geometry: Geometry, layer_id: int, device: torch.device
    ) -> tuple[StoredSide, StoredSide]:
        """Keys and values of one layer."""

    def reads(self, positions: Tensor) -> Reads:
        """What queries at consecutive `positions` read when they are decoded one by one."""


def take_rows(encoded: Tensor, stretches: Stretches) -> Tensor:
    """Pick rows `[B, num_kv_heads, R, d]` of one side from `[2, B, num_kv_heads, T, d]`, whose
    first index is `WINDOW` or `STORED`."""
    return torch.cat([encoded[form, :, :, first:last] for form, first, last in stretches], 2)


def window_reads(windows: Windows, positions: Tensor) -> Reads:
    """The query at position p reads row s <= p exactly when `s < sink` or `p - s < recent`."""
    sink, recent = windows.sink, windows.recent
    start, end = int(positions[0]), int(positions[-1]) + 1
    sinks = min(sink, end)
    stretches = (
        (WINDOW, 0, sinks),
        (STORED, sinks, max(sinks, end - recent)),
        (WINDOW, max(sinks, start - recent + 1), end),
    )
    masks = []
    for form, first, last in stretches:
        s = torch.arange(first, last, device=positions.device)
        exact = (s < sink) | (positions[:, None] - s < recent)
        masks.append(exact & (s <= positions[:, None]) if form == WINDOW else ~exact)
    return Reads(stretches, stretches, torch.cat(masks, 1))


def stored_reads(positions: Tensor) -> Reads:
    """Every query reads every row, its own included, as it is stored."""
    end = int(positions[-1]) + 1
    stretches = ((STORED, 0, end),)
    s = torch.arange(end, device=positions.device)
    return Reads(stretches, stretches, s <= positions[:, None])


def mixed_reads(positions: Tensor, exact_k: Tensor, exact_v: Tensor) -> Reads:
    """Reads of a method whose keys and values stay exact for different times.

    Args:
        positions: `[T]`, consecutive.
        exact_k: `[T, end]` bool, true where a query reads a key exactly.
    """
    seen = torch.arange(exact_k.shape[1], device=positions.device) <= positions[:, None]
    k, v, masks = [], [], []
    for form_k, of_k in ((WINDOW, exact_k), (STORED, ~exact_k)):
        for form_v, of_v in ((WINDOW, exact_v), (STORED, ~exact_v)):
            chosen = seen & of_k & of_v
            for first, last in _runs(chosen.any(0)):
                k.append((form_k, first, last))
                v.append((form_v, first, last))
                masks.append(chosen[:, first:last])
    return Reads(tuple(k), tuple(v), torch.cat(masks, 1))


def _runs(wanted: Tensor) -> Iterator[tuple[int, int]]:
    """Stretches of true values, `[first, end)`."""
    edges = torch.nn.functional.pad(wanted.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)
