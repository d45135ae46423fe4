"""The quantizer: clip, scale, offset, rounding, code order and their inverse, in plain torch on any
device.

Every kernel must give the codes of this definition. All arithmetic is float32. Codes are computed
from the float32 scale and offset, before these are rounded for storage.

Source: asymmetric INT2 with order-statistic clip of OSCAR (arXiv 2605.17757); codes of 4 bits
follow the same rules with 16 levels. We store
`offset = min` in place of a zero point: same values, but a zero point in float16 overflows on
constant rows. Feedback carries the error of a channel on as GPTQ does (arXiv 2210.17323), which is
Babai's nearest plane algorithm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.spec import BITS, MIN_RANGE, PLAIN, QuantSpec

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

    `scale = max(max(x) - min(x), 1e-8) / (levels - 1)` and `offset = min(x)`, so that
    `x ~ code * scale + offset`.

    Args:
        x: `[..., head_dim]` float32, transformed and clipped. Not modified.

    Returns:
        `scale` and `offset`, each `[..., num_groups]` float32, in the unit of `x`.
    """
    groups = x.float().unflatten(-1, (spec.num_groups, spec.group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    return (high - low).clamp_min(MIN_RANGE) / (spec.levels - 1), low


def rounding_order(head_dim: int) -> tuple[int, ...]:
    """The channels of a row in the order in which feedback carries errors on: byte by byte of codes
    of 2 bits."""
    quarter = head_dim // 4
    return tuple(byte + part * quarter for byte in range(quarter) for part in range(4))


def quantize_codes(
    x: Tensor, spec: QuantSpec, feedback: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Clip and quantize rows.

    With `feedback` W, a channel makes up for the errors of those before it. In the order of
    `rounding_order`, with the row y before its clip, its code is the one nearest to
    `t_i = y_i + sum_{j<i} r_j W_ji`, and `r_i = code * scale + offset - t_i`.

    Args:
        x: `[..., head_dim]`, any float dtype, already transformed; `[..., heads, T, head_dim]` with
            feedback. Not modified.
        feedback: `[heads, head_dim, head_dim]` float16, zeros but above the diagonal. `None` rounds
            to nearest.

    Returns:
        `codes` `[..., head_dim]` uint8 in `0 .. levels - 1`, and `affine`
        `[..., num_groups, 2]` (scale, offset) in the storage dtype; magnitudes beyond float16
        saturate.
    """
    clipped = clip_rows(x, spec)
    scale, offset = affine_parameters(clipped, spec)
    if feedback is None:
        groups = clipped.unflatten(-1, (spec.num_groups, spec.group_size))
        steps = (groups - offset[..., None]) / scale[..., None]
        codes = torch.floor(steps + 0.5).clamp(0, spec.levels - 1).flatten(-2)
    else:
        codes = _carried_on(x.float(), scale, offset, spec, feedback.float())
    dtype = SCALE_DTYPES[spec.scale_dtype]
    largest = torch.finfo(dtype).max
    affine = torch.stack([scale, offset], -1).clamp(-largest, largest).to(dtype)
    return codes.to(torch.uint8), affine


BLOCK = 16
"""Channels behind which errors are carried on to all others by one product."""


def _carried_on(
    x: Tensor, scale: Tensor, offset: Tensor, spec: QuantSpec, feedback: Tensor
) -> Tensor:
    """Codes with feedback, `[..., heads, T, head_dim]` float32."""
    order = rounding_order(spec.head_dim)
    target = x[..., list(order)].movedim(-1, 0).contiguous()  # a channel after the other
    scales, offsets = (one.movedim(-1, 0) for one in (scale, offset))
    errors, codes = torch.empty_like(target), torch.empty_like(target)
    # `[d, d, .., heads, 1]`, so that one row goes with the targets of many channels
    weights = feedback.movedim(0, -1)[..., None]
    weights = weights.reshape(*weights.shape[:2], *(1,) * (target.dim() - 3), *weights.shape[2:])
    for first in range(0, spec.head_dim, BLOCK):
        last = min(first + BLOCK, spec.head_dim)
        for at in range(first, last):
            group = order[at] // spec.group_size
            place = (target[at] - offsets[group]) / scales[group]
            codes[order[at]] = code = torch.floor(place + 0.5).clamp_(0, spec.levels - 1)
            errors[at] = error = code * scales[group] + offsets[group] - target[at]
            target[at + 1 : last].addcmul_(error, weights[at, at + 1 : last])
        if last < spec.head_dim:
            carried = torch.einsum(
                "j...ht,hji->i...ht", errors[first:last], feedback[:, first:last, last:]
            )
            target[last:] += carried
    return codes.movedim(0, -1)


def dequantize_codes(codes: Tensor, affine: Tensor, spec: QuantSpec) -> Tensor:
    """`code * scale + offset` with the stored scale and offset; `[..., head_dim]` float32."""
    groups = codes.unflatten(-1, (spec.num_groups, spec.group_size)).float()
    return (groups * affine[..., :1].float()).add_(affine[..., 1:].float()).flatten(-2)


def pack(codes: Tensor, bits: int = BITS) -> Tensor:
    """Codes to bytes in the order of `spec`.

    Args:
        codes: `[..., head_dim]`, in `0 .. 2^bits - 1`.

    Returns:
        `[..., head_dim * bits // 8]` uint8.
    """
    quarters = codes.to(torch.uint8).unflatten(-1, (bits // 2, 8 // bits, codes.shape[-1] // 4))
    packed = quarters[..., 0, :]
    for index in range(1, 8 // bits):
        packed = packed | (quarters[..., index, :] << (bits * index))
    return packed.flatten(-2)


def unpack(packed: Tensor, bits: int = BITS) -> Tensor:
    """Inverse of `pack`: `[..., head_dim * bits // 8]` bytes to `[..., head_dim]` codes, uint8."""
    parts = packed.unflatten(-1, (bits // 2, packed.shape[-1] * 2 // bits))
    mask = (1 << bits) - 1
    quarters = [(parts >> (bits * index)).bitwise_and_(mask) for index in range(8 // bits)]
    return torch.stack(quarters, dim=-2).flatten(-3)


def quantize(x: Tensor, spec: QuantSpec, feedback: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows to storage: `packed` `[..., code_bytes]` uint8, `affine` `[..., num_groups, 2]`. See
    `quantize_codes`. A row without codes is the bytes of its channels in bfloat16."""
    if spec.bits == PLAIN:
        empty = x.new_empty((*x.shape[:-1], 0, 2), dtype=SCALE_DTYPES[spec.scale_dtype])
        return x.bfloat16().contiguous().view(torch.uint8), empty
    if feedback is not None and x.is_cuda and _triton.missing(x.device) is None:
        from oscar_kernels.kv_write.launcher import quantize_rows

        with torch.cuda.device_of(x):  # a model on several GPUs has rows on each of them
            return quantize_rows(x, spec, feedback, SCALE_DTYPES[spec.scale_dtype])
    codes, affine = quantize_codes(x, spec, feedback)
    return pack(codes, spec.bits), affine


def dequantize(packed: Tensor, affine: Tensor, spec: QuantSpec) -> Tensor:
    """Storage to rows, `[..., head_dim]` float32."""
    if spec.bits == PLAIN:
        return packed.contiguous().view(torch.bfloat16).float()
    return dequantize_codes(unpack(packed, spec.bits), affine, spec)


def fake_quantize(x: Tensor, spec: QuantSpec, feedback: Tensor | None = None) -> Tensor:
    """What a row becomes when it goes through the cache: `dequantize(quantize(x))`, float32, same
    shape."""
    if feedback is not None:
        return dequantize(*quantize(x, spec, feedback), spec)
    return dequantize_codes(*quantize_codes(x, spec), spec)
