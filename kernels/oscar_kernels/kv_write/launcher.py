"""Writing new tokens into the INT2 cache of one layer, in one Triton launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.kv_write.reference import Parts
from oscar_kernels.kv_write.tuning import Tiles, write_tiles
from oscar_kernels.spec import QuantSpec


def write_kv_int2(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    *,
    windows: WindowState,
    parts: Parts = "all",
    query: Tensor | None = None,
    query_out: Tensor | None = None,
    rows_out: tuple[Tensor, Tensor] | None = None,
    tiles: Tiles | None = None,
) -> Tensor | None:
    """Transform new tokens and write their INT2 slots, ring rows and sink rows; see `reference.write_kv_int2`.

    Codes are the reference's except where a value lies on a rounding tie within the error of its sum. Nothing is
    allocated if `query_out` is given, and no device value is read on the host. In long batches a token and KV head
    reads `2 (Dk + Dv)` bytes and writes a record, but minima and maxima of the clip take longer than that; a decode
    step is bound by the latency of loading the matrices.

    Raises:
        ValueError: shapes, types or strides do not fit, or Triton cannot run on this device.
    """
    _check(key, value, cache, transforms, targets)
    if query is not None:
        _check_query(query, key)
        query_out = torch.empty_like(query, memory_format=torch.contiguous_format) if query_out is None else query_out
    if rows_out is not None and not (rows_out[0].is_contiguous() and rows_out[1].is_contiguous()):
        raise ValueError("rows_out must be contiguous")
    if len(key):
        tiles = tiles or _tiles(key, cache)
        _launch(key, value, cache, transforms, targets, windows, parts, query, query_out, rows_out, tiles)
    return query_out


def _tiles(key: Tensor, cache: LayerCache) -> Tiles:
    padded = 4 * max(_quarter(cache.k_spec), _quarter(cache.v_spec))
    return write_tiles(padded, sixteen_bit=key.dtype.itemsize == 2, interpreted=_triton.interpreted())


def _launch(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    windows: WindowState,
    parts: Parts,
    query: Tensor | None,
    query_out: Tensor | None,
    rows_out: tuple[Tensor, Tensor] | None,
    tiles: Tiles,
) -> None:
    from oscar_kernels.kv_write.kernel import _write_kv_int2_kernel

    tokens, heads = key.shape[:2]
    group = 0 if query is None else query.shape[1] // heads
    kv_programs = min(-(-tokens // tiles.block_m), tiles.programs)
    query_programs = min(-(-tokens * group // tiles.block_m), tiles.programs * group)
    new_query, out_query = (key, key) if query is None or query_out is None else (query, query_out)
    key_out, value_out = rows_out or (key, value)
    mean = transforms.k_mean
    _write_kv_int2_kernel[(heads * (2 * kv_programs + query_programs),)](
        key, value, new_query, out_query, key_out, value_out,
        cache.codes, cache.affine, cache.ring_k, cache.ring_v, cache.sink_k, cache.sink_v,
        transforms.k_forward, transforms.v_forward, transforms.q_partner,
        transforms.k_forward if mean is None else mean,
        targets.slots, targets.rows, targets.positions, targets.ends, windows.sink_block,
        tokens, kv_programs, query_programs,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), new_query.stride(0), new_query.stride(1),
        out_query.stride(0), out_query.stride(1),
        _head_stride(transforms.k_forward), _head_stride(transforms.v_forward), _head_stride(transforms.q_partner),
        0 if mean is None else _head_stride(mean),
        HEADS=heads, GROUP=group, RECENT=cache.recent, SINK=cache.sink,
        LANE_COLUMNS=1 if _triton.interpreted() else 8, LARGEST=torch.finfo(cache.affine.dtype).max,
        MEAN=mean is not None, SLOTS=parts != "windows", WINDOWS=parts != "slots", ROWS_OUT=rows_out is not None,
        PTX=torch.version.cuda is not None and not _triton.interpreted(),
        PRECISION="ieee" if _triton.interpreted() or tiles.parts else "tf32x3",
        PARTS=tiles.parts, BLOCK_M=tiles.block_m, STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
        **_row_constants(cache.k_spec, tiles, "K"), **_row_constants(cache.v_spec, tiles, "V"),
    )  # fmt: skip


def _row_constants(spec: QuantSpec, tiles: Tiles, side: str) -> dict[str, Any]:
    """What the kernel knows of a row when it is compiled."""
    rank = 0 if spec.clip_index in (None, spec.head_dim - 1) else spec.head_dim - (spec.clip_index or 0)
    quarter = _quarter(spec)
    constants = {
        "D": spec.head_dim,
        "QUARTER_": quarter,
        "GROUPS_": spec.num_groups,
        "RANK_": rank,
        "BLOCK_K_": min(tiles.block_k, 4 * quarter),
    }
    return {name + side: constant for name, constant in constants.items()}


def _quarter(spec: QuantSpec) -> int:
    """Channels of a quarter, padded to a power of two."""
    return 1 << (spec.head_dim // 4 - 1).bit_length()


def _head_stride(x: Tensor) -> int:
    """From one head's matrix to the next; 0 if all share one."""
    return 0 if x.shape[0] == 1 else x.stride(0)


def _check(key: Tensor, value: Tensor, cache: LayerCache, transforms: Transforms, targets: TokenTargets) -> None:
    reason = _triton.missing(key.device)
    if reason is not None:
        raise ValueError(reason)
    tokens, heads, dk, dv = len(key), cache.num_kv_heads, cache.k_spec.head_dim, cache.v_spec.head_dim
    if key.shape != (tokens, heads, dk) or value.shape != (tokens, heads, dv):
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)}: [T, {heads}, {dk}] and {dv} needed")
    if key.dtype != value.dtype or key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError(f"key {key.dtype} and value {value.dtype} need one type and adjacent channels")
    if min(dk, dv) < 16:
        raise ValueError(f"head_dim {min(dk, dv)} is less than 16, the least of a matrix unit")
    for name, dim in (("k_forward", dk), ("q_partner", dk), ("v_forward", dv)):
        matrix = getattr(transforms, name)
        if matrix.shape[0] not in (1, heads) or matrix.shape[1:] != (dim, dim) or not matrix.is_contiguous():
            raise ValueError(f"{name} {tuple(matrix.shape)}: contiguous [1 or {heads}, {dim}, {dim}] needed")
        if matrix.dtype != torch.float32:
            raise ValueError(f"{name} is {matrix.dtype}, not float32")
    for name in ("slots", "rows", "positions", "ends"):
        if getattr(targets, name).shape != (tokens,) or not getattr(targets, name).is_contiguous():
            raise ValueError(f"targets.{name} {tuple(getattr(targets, name).shape)}: contiguous [{tokens}] needed")


def _check_query(query: Tensor, key: Tensor) -> None:
    tokens, heads, dim = key.shape
    if len(query) != tokens or query.shape[1] % heads or query.shape[2] != dim or query.dtype != key.dtype:
        raise ValueError(f"query {tuple(query.shape)} {query.dtype} does not fit key {tuple(key.shape)} {key.dtype}")
    if query.stride(2) != 1:
        raise ValueError("query needs adjacent channels")
