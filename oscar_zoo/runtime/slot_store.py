"""Every cached token as INT2, in the slot that SGLang gave it: records as `oscar_kernels.cache`
lays them out.

Complete at write time, so any request may read any slot of a shared prefix. Codes come from the one
quantizer, on rows that are already transformed and still float32. Needs no sglang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels import layout, quantizer
from oscar_kernels.spec import QuantSpec

POISON = 7.0


@dataclass(frozen=True)
class SlotShape:
    """Size of the store of one worker."""

    num_layers: int
    num_slots: int
    num_kv_heads: int
    k: QuantSpec
    v: QuantSpec

    def token_bytes(self, mode: str = "int2") -> int:
        """Bytes of one token over all layers and heads."""
        per_head = layout.row_bytes(self.k) + layout.row_bytes(self.v)
        if mode == "lossless":
            per_head += 4 * (self.k.head_dim + self.v.head_dim)
        return self.num_layers * self.num_kv_heads * per_head


class SlotStore:
    """Buffers per layer; `slots` are the ids of SGLang's allocator, the first page is its dummy
    page.

    Args:
        shape: sizes and quantizers.
        device: where the buffers live.
        mode: `int2`, or a test mode (`testing`).
    """

    def __init__(self, shape: SlotShape, device: str | torch.device, mode: str = "int2") -> None:
        self.shape = shape
        self.mode = mode

        def rows(width: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
            size = (shape.num_slots, shape.num_kv_heads, *width)
            return [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]

        k, v = shape.k, shape.v
        split, groups = layout.code_bytes(k), k.num_groups
        self.codes = rows((split + layout.code_bytes(v),), torch.uint8)
        self.affine = rows((2 * (groups + v.num_groups),), quantizer.SCALE_DTYPES[k.scale_dtype])
        self.k_codes, self.v_codes = (
            [r[..., :split] for r in self.codes],
            [r[..., split:] for r in self.codes],
        )
        pairs = [r.unflatten(-1, (-1, 2)) for r in self.affine]
        self.k_affine, self.v_affine = (
            [p[..., :groups, :] for p in pairs],
            [p[..., groups:, :] for p in pairs],
        )
        exact = mode == "lossless"
        self.k_exact = rows((k.head_dim,), torch.float32) if exact else []
        self.v_exact = rows((v.head_dim,), torch.float32) if exact else []

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize and store.

        Args:
            layer: local layer index.
            slots: `[tokens]` int64.
            k, v: `[tokens, num_kv_heads, head_dim]` float32, transformed.
        """
        if self.mode == "lossless":
            self.k_exact[layer][slots], self.v_exact[layer][slots] = k, v
        if self.mode == "poison":
            k, v = torch.full_like(k, POISON), torch.full_like(v, POISON)
        self.k_codes[layer][slots], self.k_affine[layer][slots] = quantizer.quantize(
            k, self.shape.k
        )
        self.v_codes[layer][slots], self.v_affine[layer][slots] = quantizer.quantize(
            v, self.shape.v
        )

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of `slots` in the transformed domain, `[tokens, num_kv_heads, head_dim]`
        float32."""
        if self.mode == "lossless":
            return self.k_exact[layer][slots], self.v_exact[layer][slots]
        return (
            quantizer.dequantize(
                self.k_codes[layer][slots], self.k_affine[layer][slots], self.shape.k
            ),
            quantizer.dequantize(
                self.v_codes[layer][slots], self.v_affine[layer][slots], self.shape.v
            ),
        )

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy slots `source` to `target`, all layers."""
        for buffer in self.buffers():
            buffer[target] = buffer[source]

    def buffers(self) -> Iterator[Tensor]:
        """Every tensor of the store; `k_codes` and the like are views into them."""
        for group in (self.codes, self.affine, self.k_exact, self.v_exact):
            yield from group

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store."""
        return sum(buffer.nbytes for buffer in self.buffers())
