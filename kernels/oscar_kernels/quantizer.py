"""The quantizer: clip, scale, offset, rounding, code order and their inverse, in plain torch on any
device.

Every kernel must give the codes of this definition. All arithmetic is float32. Codes are computed
from the float32 scale and offset, before these are rounded for storage.

Source: asymmetric INT2 with order-statistic clip of OSCAR (arXiv 2605.17757). We store
`offset = min` in place of a zero point: same values, but a zero point in float16 overflows on
constant rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernels.spec import LEVELS, MIN_RANGE, QuantSpec

SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def clip_rows(x: Tensor, spec: QuantSpec) -> Tensor:
    """Saturate every row at one order statistic of its absolute values, over the whole row whatever
    the groups.

    Args:
        x: `[..., head_dim]`, any float dtype. Not modified.
        spec: `clip_index` picks the order statistic.

    Returns:
        Float32 `[..., head_dim]`.
    """
    x = x.float()
    index = spec.clip_index
    if index is None:
        return x
    limit = (
        x.abs().topk(spec.head_dim - index, dim=-1).values[..., -1:]
    )  # few are above it: cheaper than a sort
    return torch.minimum(torch.maximum(x, -limit), limit)


def affine_parameters(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Scale and offset of every group of every row, before rounding to their storage dtype.

    `scale = max(max(x) - min(x), 1e-8) / 3` and `offset = min(x)`, so that
    `x ~ code * scale + offset`.

    Args:
        x: `[..., head_dim]` float32, transformed and clipped. Not modified.

    Returns:
        `scale` and `offset`, each `[..., num_groups]` float32, in the unit of `x`.
    """
    groups = x.float().unflatten(-1, (spec.num_groups, spec.group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    return (high - low).clamp_min(MIN_RANGE) / (LEVELS - 1), low


def quantize_codes(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Clip and quantize rows.

    Args:
        x: `[..., head_dim]`, any float dtype, already transformed. Not modified.

    Returns:
        `codes` `[..., head_dim]` uint8 in 0..3, and `affine` `[..., num_groups, 2]` (scale, offset)
        in the storage dtype; magnitudes beyond float16 saturate.
    """
    x = clip_rows(x, spec)
    scale, offset = affine_parameters(x, spec)
    groups = x.unflatten(-1, (spec.num_groups, spec.group_size))
    codes = torch.floor((groups - offset[..., None]) / scale[..., None] + 0.5).clamp(0, LEVELS - 1)
    dtype = SCALE_DTYPES[spec.scale_dtype]
    largest = torch.finfo(dtype).max
    affine = torch.stack([scale, offset], -1).clamp(-largest, largest).to(dtype)
    return codes.flatten(-2).to(torch.uint8), affine


def dequantize_codes(codes: Tensor, affine: Tensor, spec: QuantSpec) -> Tensor:
    """`code * scale + offset` with the stored scale and offset; `[..., head_dim]` float32."""
    groups = codes.unflatten(-1, (spec.num_groups, spec.group_size)).float()
    return (groups * affine[..., :1].float() + affine[..., 1:].float()).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """`[..., head_dim]` codes in 0..3 to `[..., head_dim // 4]` bytes in the order of `layout`."""
    quarter = codes.unflatten(-1, (4, codes.shape[-1] // 4)).to(torch.uint8)
    return (
        quarter[..., 0, :]
        | (quarter[..., 1, :] << 2)
        | (quarter[..., 2, :] << 4)
        | (quarter[..., 3, :] << 6)
    )


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`: `[..., head_dim // 4]` bytes to `[..., head_dim]` codes, uint8."""
    return torch.stack([(packed >> (2 * i)) & 3 for i in range(4)], dim=-2).flatten(-2)


def quantize(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Rows to storage: `packed` `[..., head_dim // 4]` uint8, `affine` `[..., num_groups, 2]`. See
    `quantize_codes`."""
    codes, affine = quantize_codes(x, spec)
    return pack(codes), affine


def dequantize(packed: Tensor, affine: Tensor, spec: QuantSpec) -> Tensor:
    """Storage to rows, `[..., head_dim]` float32."""
    return dequantize_codes(unpack(packed), affine, spec)


def fake_quantize(x: Tensor, spec: QuantSpec) -> Tensor:
    """What a row becomes when it goes through the cache: `dequantize(quantize(x))`, float32, same
    shape."""
    codes, affine = quantize_codes(x, spec)
    return dequantize_codes(codes, affine, spec)
