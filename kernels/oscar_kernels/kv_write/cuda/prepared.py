"""The matrices of a transform as the CUDA kernel keeps them in shared memory, worked out once.

A float32 matrix becomes two bfloat16 ones: the larger half is cut off, the smaller one is the rest, rounded. Column `n`
is channel `channels(D)[n]`; its numbers lie in 16-byte units, unit `u` of rows `8 u .. 8 u + 7` in plane `u // 8`, and
within the plane where the matrix units look for it: at `n * 128 + ((u ^ n) % 8) * 16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from oscar_kernels.cache import Transforms

UNIT = 8
"""Numbers of 16 bytes."""


@dataclass(frozen=True)
class Prepared:
    """What a launch reads.

    Attributes:
        k, q: `[1 | H, 4 Dk^2]` bytes, both halves of `k_forward` and `q_partner`.
        v: `[1 | H, 4 Dv^2]` bytes, those of `v_forward`.
        k_sums: `[1 | H, Dk]` float32, `k_mean` times what the halves of `k_forward` stand for; `None` without a mean.
    """

    k: Tensor
    v: Tensor
    q: Tensor
    k_sums: Tensor | None


_KEPT: WeakKeyDictionary[Transforms, Prepared] = WeakKeyDictionary()


def prepared(transforms: Transforms) -> Prepared:
    """Of these transforms, which must not change any more; allocated at the first call, then kept beside them."""
    found = _KEPT.get(transforms)
    if found is None:
        halves, mean = _halves(transforms.k_forward), transforms.k_mean
        sums = None if mean is None else (mean.double()[:, :, None] * halves.double().sum(1)).sum(1).float()
        k, v = _arranged(halves), _arranged(_halves(transforms.v_forward))
        q = k if transforms.q_partner is transforms.k_forward else _arranged(_halves(transforms.q_partner))
        found = _KEPT[transforms] = Prepared(k, v, q, None if sums is None else sums.contiguous())
        if k.is_cuda and not torch.cuda.is_current_stream_capturing():
            # A launch reads them while the kernel in front still runs: that must not be the one which makes them.
            torch.cuda.current_stream(k.device).synchronize()
    return found


def channels(dim: int) -> Tensor:
    """Channel of every column of a product, `[D]`; `channel_of` of types.cuh, where it is explained."""
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
    planes = halves.unflatten(2, (dim // 64, 8, UNIT)).permute(0, 1, 2, 5, 3, 4)  # [M, 2, plane, n, unit, number]
    place = torch.arange(8, device=halves.device)
    turned = place ^ (torch.arange(dim, device=halves.device) % 8)[:, None]  # its own inverse
    units = planes.take_along_dim(turned[None, None, None, :, :, None], 4)
    return units.contiguous().view(torch.uint8).flatten(1)
