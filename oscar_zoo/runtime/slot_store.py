"""Every cached token as INT2, in the slot that the engine gave it.

`oscar_kernels.cache` describes the records. A slot is complete once it is written, so any request
may read any slot of a shared prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from oscar_kernels import quantizer
from oscar_kernels.cache import LayerCache
from oscar_kernels.spec import QuantSpec, code_bytes, row_bytes

if TYPE_CHECKING:
    from oscar_zoo.runtime.window_store import WindowStore


@dataclass(frozen=True)
class SlotShape:
    """Size of the store of one worker.

    Attributes:
        specs: what a row of keys and of values is, for every local layer. Layers differ in bits
            and clip only.
        num_slots: slots, the dummy page included.
        num_kv_heads: local KV heads.
    """

    specs: tuple[tuple[QuantSpec, QuantSpec], ...]
    num_slots: int
    num_kv_heads: int

    @classmethod
    def alike(
        cls, num_layers: int, num_slots: int, num_kv_heads: int, k: QuantSpec, v: QuantSpec
    ) -> Self:
        """A store whose layers have the same rows."""
        return cls(((k, v),) * num_layers, num_slots, num_kv_heads)

    @property
    def num_layers(self) -> int:
        """Local layers."""
        return len(self.specs)

    @property
    def k(self) -> QuantSpec:
        """Keys of the first layer: the channels and groups of all of them."""
        return self.specs[0][0]

    @property
    def v(self) -> QuantSpec:
        """Values of the first layer: the channels and groups of all of them."""
        return self.specs[0][1]

    def token_bytes(self) -> int:
        """Bytes of one token over all layers and heads."""
        rows = (row_bytes(spec) for both in self.specs for spec in both)
        return self.num_kv_heads * sum(rows)


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """Zeros, which on a CPU take no memory before they are written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    blank = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)  # `torch.zeros` writes every page
    return torch.from_numpy(blank).view(dtype).view(size)


class SlotStore:
    """Codes and affine parameters of all slots, one pair of tensors per layer.

    Slots are numbered by the engine's allocator. Its first page is a dummy that padding writes.

    Args:
        shape: sizes and quantizers.
        device: where the buffers live.
    """

    def __init__(self, shape: SlotShape, device: str | torch.device) -> None:
        self.shape = shape
        codes = [code_bytes(k) + code_bytes(v) for k, v in shape.specs]
        affine = [2 * (k.num_groups + v.num_groups) for k, v in shape.specs]
        self.codes = self.rows(codes, torch.uint8, device)
        self.affine = self.rows(affine, quantizer.SCALE_DTYPES[shape.k.scale_dtype], device)

    def rows(
        self, widths: Sequence[int], dtype: torch.dtype, device: str | torch.device
    ) -> list[Tensor]:
        """Zeros `[num_slots, num_kv_heads, width]`, one tensor per layer.

        On a CPU the system gives a page when it is first written, so that a store of many gigabytes
        is there at once.
        """
        size = (self.shape.num_slots, self.shape.num_kv_heads)
        return [zeros((*size, width), dtype, device) for width in widths]

    def layer(self, index: int, windows: WindowStore) -> LayerCache:
        """The cache of one layer: its slots, with the windows that lie on top of them."""
        return LayerCache(
            *self.shape.specs[index],
            self.codes[index],
            self.affine[index],
            windows.ring_k[index],
            windows.ring_v[index],
            windows.sink_k[index],
            windows.sink_v[index],
            windows.shape.recent,
        )

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy slots `source` to `target`, in all layers."""
        for buffer in self.buffers():
            buffer[target] = buffer[source]

    def buffers(self) -> Iterator[Tensor]:
        """Every tensor of the store."""
        yield from self.codes
        yield from self.affine

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store, as allocated."""
        return sum(buffer.nbytes for buffer in self.buffers())
