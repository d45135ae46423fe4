"""Writing new tokens into the INT2 cache of one layer, in one Triton launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.kv_write.arguments import check, clip_rank
from oscar_kernels.kv_write.reference import Parts
from oscar_kernels.kv_write.tuning import WriteTiles, write_tiles
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
    tiles: WriteTiles | None = None,
) -> Tensor | None:
    """Transform new tokens and write their INT2 slots, ring rows and sink rows; see
    `reference.write_kv_int2`.

    Codes are the reference's except where a value lies on a rounding tie within the error of its
    sum. Nothing is allocated if `query_out` is given, and no device value is read on the host. In
    long batches a token and KV head reads `2 (Dk + Dv)` bytes and writes a record, but minima and
    maxima of the clip take longer than that; a decode step is bound by the latency of loading the
    matrices.
    """
    reason = _triton.missing(key.device)
    if reason is not None:
        raise ValueError(reason)
    check(key, value, cache, transforms, targets, query, rows_out)
    if query is not None:
        query_out = (
            torch.empty_like(query, memory_format=torch.contiguous_format)
            if query_out is None
            else query_out
        )
    if len(key):
        tiles = tiles or _tiles(key, cache)
        _launch(
            key,
            value,
            cache,
            transforms,
            targets,
            windows,
            parts,
            query,
            query_out,
            rows_out,
            tiles,
        )
    return query_out


def _tiles(key: Tensor, cache: LayerCache) -> WriteTiles:
    padded = 4 * max(_quarter(cache.k_spec), _quarter(cache.v_spec))
    return write_tiles(
        padded, sixteen_bit=key.dtype.itemsize == 2, interpreted=_triton.interpreted()
    )


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
    tiles: WriteTiles,
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
        key,
        value,
        new_query,
        out_query,
        key_out,
        value_out,
        cache.codes,
        cache.affine,
        cache.ring_k,
        cache.ring_v,
        cache.sink_k,
        cache.sink_v,
        transforms.k_forward,
        transforms.v_forward,
        transforms.q_partner,
        transforms.k_forward if mean is None else mean,
        targets.out_loc,
        targets.rows,
        targets.positions,
        targets.ends,
        windows.sink_block,
        tokens,
        kv_programs,
        query_programs,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        new_query.stride(0),
        new_query.stride(1),
        out_query.stride(0),
        out_query.stride(1),
        _head_stride(transforms.k_forward),
        _head_stride(transforms.v_forward),
        _head_stride(transforms.q_partner),
        0 if mean is None else _head_stride(mean),
        HEADS=heads,
        GROUP=group,
        RECENT=cache.recent,
        RING=cache.ring_rows,
        SINK=cache.sink,
        LANE_COLUMNS=1 if _triton.interpreted() else 8,
        LARGEST=torch.finfo(cache.affine.dtype).max,
        MEAN=mean is not None,
        SLOTS=parts != "windows",
        WINDOWS=parts != "slots",
        ROWS_OUT=rows_out is not None,
        PTX=torch.version.cuda is not None and not _triton.interpreted(),
        PRECISION="ieee" if _triton.interpreted() or tiles.parts else "tf32x3",
        PARTS=tiles.parts,
        BLOCK_M=tiles.block_m,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **_row_constants(cache.k_spec, tiles, "K"),
        **_row_constants(cache.v_spec, tiles, "V"),
    )


def _row_constants(spec: QuantSpec, tiles: WriteTiles, side: str) -> dict[str, Any]:
    """What the kernel knows of a row when it is compiled."""
    quarter = _quarter(spec)
    constants = {
        "D": spec.head_dim,
        "QUARTER_": quarter,
        "GROUPS_": spec.num_groups,
        "BITS_": spec.bits,
        "RANK_": clip_rank(spec),
        "BLOCK_K_": min(tiles.block_k, 4 * quarter),
    }
    return {name + side: constant for name, constant in constants.items()}


def _quarter(spec: QuantSpec) -> int:
    """Channels of a quarter, padded to a power of two."""
    return 1 << (spec.head_dim // 4 - 1).bit_length()


def _head_stride(x: Tensor) -> int:
    """From one head's matrix to the next; 0 if all share one."""
    return 0 if x.shape[0] == 1 else x.stride(0)
