"""The matrices of a transform as the CUDA kernel keeps them in shared memory, computed once.

A float32 matrix becomes two bfloat16 ones: the larger half is cut off, the smaller one is the rest,
rounded. Column `n` is channel `channels(D)[n]`; its numbers lie in 16-byte units, unit `u` of rows
`8 u .. 8 u + 7` in plane `u // 8`, and within the plane where the tensor cores look for it: at
`n * 128 + ((u ^ n) % 8) * 16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from oscar_kernels.cache import Transforms

UNIT = 8
"""Elements of 16 bytes."""


@dataclass(frozen=True)
class Prepared:
    """What a launch reads.

    Attributes:
        k, q: `[1 | H, 4 Dk^2]` bytes, both halves of `k_forward` and `q_partner`.
        v: `[1 | H, 4 Dv^2]` bytes, those of `v_forward`.
        k_mean: `[1 | H, 32 Dk]` bytes, `-k_mean` times what the halves of `k_forward` stand for, or
            zeros without a mean: sixteen more rows of a matrix, the first three of which are the
            summands of a float32 number.
    """

    k: Tensor
    v: Tensor
    q: Tensor
    k_mean: Tensor


_KEPT: WeakKeyDictionary[Transforms, Prepared] = WeakKeyDictionary()


def prepared(transforms: Transforms) -> Prepared:
    """The prepared matrices of transforms, which must not change any more. They are allocated at
    the first call and kept as long as the transforms."""
    found = _KEPT.get(transforms)
    if found is None:
        halves, mean = _halves(transforms.k_forward), transforms.k_mean
        mean = halves.new_zeros(1, halves.shape[-1]) if mean is None else mean
        sums = -(mean.double()[:, :, None] * halves.double().sum(1)).sum(1).float()
        k, v = _arranged(halves), _arranged(_halves(transforms.v_forward))
        q = (
            k
            if transforms.q_partner is transforms.k_forward
            else _arranged(_halves(transforms.q_partner))
        )
        found = _KEPT[transforms] = Prepared(k, v, q, _strip(sums))
        if k.is_cuda and not torch.cuda.is_current_stream_capturing():
            # A launch reads them while the kernel in front still runs: that must not be the one
            # which makes them.
            torch.cuda.current_stream(k.device).synchronize()
    return found


def channels(dim: int) -> Tensor:
    """Channel of every column of a product, `[D]`; `channel_of` of product.cuh, where it is
    explained."""
    n, quarter = torch.arange(dim), dim // 32
    j, t, e = n // 8, n // 2 % 4, n % 2
    return j // quarter * (dim // 4) + 2 * quarter * t + 2 * (j % quarter) + e


def _halves(matrix: Tensor) -> Tensor:
    """`[M, 2, D, D]` bfloat16, larger half first, columns in the order of a product."""
    y = matrix[:, :, channels(matrix.shape[1]).to(matrix.device)].contiguous()
    high = (y.view(torch.int32) & -65536).view(torch.float32)
    return torch.stack((high.bfloat16(), (y - high).bfloat16()), 1)


def _arranged(halves: Tensor) -> Tensor:
    dim = halves.shape[-1]
    planes = halves.unflatten(2, (dim // 64, 8, UNIT)).permute(
        0, 1, 2, 5, 3, 4
    )  # [M, 2, plane, n, unit, number]
    place = torch.arange(8, device=halves.device)
    turned = place ^ (torch.arange(dim, device=halves.device) % 8)[:, None]  # its own inverse
    units = planes.take_along_dim(turned[None, None, None, :, :, None], 4)
    return units.contiguous().view(torch.uint8).flatten(1)


def _strip(sums: Tensor) -> Tensor:
    """`[M, 32 D]` bytes: of eight columns first rows 0 to 7 of each, then rows 8 to 15."""
    parts, rest = list[Tensor](), sums
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    rows = torch.stack(parts, -1).unflatten(1, (-1, 1, 8))  # [M, D / 8, 1, column, part]
    strip = rows.new_zeros(*rows.shape[:2], 2, 8, UNIT)
    strip[:, :, :1, :, :3] = rows
    return strip.view(torch.uint8).flatten(1)
