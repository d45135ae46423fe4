"""Checks and row constants that every implementation of the write shares."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernels.cache import LayerCache, TokenTargets, Transforms
from oscar_kernels.spec import QuantSpec


def clip_rank(spec: QuantSpec) -> int:
    """Rank of the magnitude that is the threshold of the clip, where 1 is the largest; 0 without a
    clip."""
    return (
        0
        if spec.clip_index in (None, spec.head_dim - 1)
        else spec.head_dim - (spec.clip_index or 0)
    )


def check(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    query: Tensor | None,
    rows_out: tuple[Tensor, Tensor] | None,
) -> None:
    """Check shapes, types and strides of the arguments of `reference.write_kv_int2`."""
    tokens, heads, dk, dv = (
        len(key),
        cache.num_kv_heads,
        cache.k_spec.head_dim,
        cache.v_spec.head_dim,
    )
    if key.shape != (tokens, heads, dk) or value.shape != (tokens, heads, dv):
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)}: [T, {heads}, {dk}] and {dv}"
            " needed"
        )
    if key.dtype != value.dtype or key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError(
            f"key {key.dtype} and value {value.dtype} need one type and adjacent channels"
        )
    if min(dk, dv) < 16:
        raise ValueError(
            f"head_dim {min(dk, dv)} is less than 16, the smallest tile of a tensor core"
        )
    _check_transforms(transforms, heads, dk, dv)
    for name in ("out_loc", "rows", "positions", "ends"):
        if getattr(targets, name).shape != (tokens,) or not getattr(targets, name).is_contiguous():
            raise ValueError(
                f"targets.{name} {tuple(getattr(targets, name).shape)}: contiguous [{tokens}]"
                " needed"
            )
    if rows_out is not None and not (rows_out[0].is_contiguous() and rows_out[1].is_contiguous()):
        raise ValueError("rows_out must be contiguous")
    if query is not None:
        _check_query(query, key)


def _check_transforms(transforms: Transforms, heads: int, dk: int, dv: int) -> None:
    shapes = {"k_forward": (dk, dk), "q_partner": (dk, dk), "v_forward": (dv, dv), "k_mean": (dk,)}
    for name, shape in shapes.items():
        x = getattr(transforms, name)
        if x is None:
            continue
        if x.shape[0] not in (1, heads) or x.shape[1:] != shape or not x.is_contiguous():
            raise ValueError(
                f"{name} {tuple(x.shape)}: contiguous [1 or {heads}, {', '.join(map(str, shape))}]"
                " needed"
            )
        if x.dtype != torch.float32:
            raise ValueError(f"{name} is {x.dtype}, not float32")


def _check_query(query: Tensor, key: Tensor) -> None:
    tokens, heads, dim = key.shape
    if (
        len(query) != tokens
        or query.shape[1] % heads
        or query.shape[2] != dim
        or query.dtype != key.dtype
    ):
        raise ValueError(
            f"query {tuple(query.shape)} {query.dtype} does not fit key {tuple(key.shape)}"
            f" {key.dtype}"
        )
    if query.stride(2) != 1:
        raise ValueError("query needs adjacent channels")
