"""Writing new tokens into the INT2 cache of one layer, in one Triton launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.reference import Parts
from oscar_kernels.spec import QuantSpec, code_bytes


@dataclass(frozen=True)
class WriteTiles:
    """How one launch is cut.

    Attributes:
        block_m: tokens of a tile.
        block_k: rows of the matrix that are multiplied at a time; with `head_dim` rows the whole
            matrix stays on the chip.
        parts: number of 16-bit matrices whose sum replaces a float32 matrix; 0 keeps float32.
        warps, stages: of a program.
        programs: most programs for the tokens of one head of K or V.
    """

    block_m: int
    block_k: int
    parts: int
    warps: int
    stages: int
    programs: int


def write_tiles(
    padded_dim: int, *, sixteen_bit: bool, interpreted: bool, rows: int = 64
) -> WriteTiles:
    """Tiles for rows of `padded_dim` channels, the larger of K's and V's.

    They do not depend on the number of tokens: prefill and decode must sum in the same order, or a
    value on a rounding tie gets different codes. Two parts of a matrix change 3 codes in a million,
    one part changes 1 in a thousand, and three parts change none; 8,192 tokens take 41, 37 and 58
    microseconds with them. Larger tiles, and fewer registers for more warps, gain nothing.

    Args:
        sixteen_bit: new tokens are bfloat16 or float16, exact operands of the tensor cores.
        rows: most tokens of a tile.
    """
    if interpreted:
        return WriteTiles(block_m=16, block_k=16, parts=0, warps=4, stages=1, programs=2)
    if padded_dim > 256:
        # Four times the matrix of 128 channels, and half the tokens: compiled for compute
        # capability 9 it needs as many registers as one of 256. Not measured.
        parts = 2 if sixteen_bit else 0
        return WriteTiles(block_m=32, block_k=16, parts=parts, warps=8, stages=1, programs=128)
    if not sixteen_bit:
        return WriteTiles(block_m=rows, block_k=32, parts=0, warps=4, stages=1, programs=64)
    if padded_dim > 128:
        return WriteTiles(block_m=rows, block_k=32, parts=2, warps=8, stages=1, programs=64)
    return WriteTiles(block_m=rows, block_k=128, parts=2, warps=4, stages=2, programs=32)


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
    _triton.require(key.device, key.dtype)
    check(key, value, cache, transforms, targets, query, rows_out)
    if query is not None and query_out is None:
        query_out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not len(key):
        return query_out
    if query is not None and query_out is not None and cache.latent:
        width = cache.k_spec.head_dim
        query_out[..., width:].copy_(query[..., width:])
    tiles = tiles or usual_tiles(key, cache)
    from oscar_kernels.kv_write.kernel import _write_kv_int2_kernel

    tokens, heads = key.shape[:2]
    group = 0 if query is None else query.shape[1] // heads
    kv_programs = min(-(-tokens // tiles.block_m), tiles.programs)
    query_programs = min(-(-tokens * group // tiles.block_m), tiles.programs * group)
    new_query, out_query = (key, key) if query is None or query_out is None else (query, query_out)
    key_out, value_out = rows_out or (key, value)
    mean, feedback = transforms.k_mean, transforms.k_feedback
    _write_kv_int2_kernel[(heads * (2 * kv_programs + query_programs),)](
        key, value, new_query, out_query, key_out, value_out, *cache.stores,
        transforms.k_forward,
        transforms.v_forward, transforms.q_partner, transforms.k_forward if mean is None else mean,
        transforms.k_forward if feedback is None else feedback,
        targets.out_loc, targets.rows, targets.positions, targets.ends, windows.sink_block, tokens,
        kv_programs, query_programs, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        new_query.stride(0), new_query.stride(1), out_query.stride(0), out_query.stride(1),
        _head_stride(transforms.k_forward), _head_stride(transforms.v_forward),
        _head_stride(transforms.q_partner), 0 if mean is None else _head_stride(mean),
        HEADS=heads, GROUP=group, RECENT=cache.recent, RING=cache.ring_rows, SINK=cache.sink,
        LANE_COLUMNS=1 if _triton.interpreted() else 8, LARGEST=torch.finfo(cache.affine.dtype).max,
        MEAN=mean is not None, SLOTS=parts != "windows", WINDOWS=parts != "slots",
        ROWS_OUT=rows_out is not None,
        PTX=torch.version.cuda is not None and not _triton.interpreted(),
        PRECISION="ieee" if _triton.interpreted() or tiles.parts else "tf32x3", PARTS=tiles.parts,
        FEEDBACK=feedback is not None,
        BLOCK_M=tiles.block_m, STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
        **_row_constants(cache.k_spec, tiles, "K"), **_row_constants(cache.v_spec, tiles, "V"),
    )  # fmt: skip
    return query_out


def usual_tiles(key: Tensor, cache: LayerCache) -> WriteTiles:
    """Those of `write_tiles` for these tensors."""
    padded = 4 * max(_triton.quarter(cache.k_spec), _triton.quarter(cache.v_spec))
    # Triton 3.6 would put products of 64 rows into the tensor memory of compute capability 10, and
    # stops with an error of its own.
    rows = 32 if _triton.capability(key.device)[0] == 10 else 64
    return write_tiles(
        padded, sixteen_bit=key.dtype.itemsize == 2, interpreted=_triton.interpreted(), rows=rows
    )


def _row_constants(spec: QuantSpec, tiles: WriteTiles, side: str) -> dict[str, Any]:
    """What the kernel knows of a row when it is compiled."""
    quarter = _triton.quarter(spec)
    constants = {
        "D": spec.head_dim,
        "QUARTER_": quarter,
        "GROUPS_": spec.num_groups,
        "BITS_": spec.bits,
        "RANK_": clip_rank(spec),
        "BLOCK_K_": min(tiles.block_k, 4 * quarter),
    }
    return {name + side: constant for name, constant in constants.items()}


def _head_stride(x: Tensor) -> int:
    """From one head's matrix to the next; 0 if all share one."""
    return 0 if x.shape[0] == 1 else x.stride(0)


def clip_rank(spec: QuantSpec) -> int:
    """Rank of the magnitude that is the threshold of the clip, where 1 is the largest; 0 without a
    clip."""
    index = spec.clip_index
    return 0 if index in (None, spec.head_dim - 1) else spec.head_dim - (index or 0)


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
    tokens, heads = len(key), cache.num_kv_heads
    dk, dv = cache.k_spec.head_dim, cache.v_spec.head_dim
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
    _check_transforms(transforms, heads, dk, dk if cache.latent else dv)
    for name, x in vars(targets).items():
        if x.shape != (tokens,) or not x.is_contiguous():
            raise ValueError(f"targets.{name} {tuple(x.shape)}: contiguous [{tokens}] needed")
    if rows_out is not None and not (rows_out[0].is_contiguous() and rows_out[1].is_contiguous()):
        raise ValueError("rows_out must be contiguous")
    if query is not None:
        _check_query(query, key, cache.query_dim)


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
    if (weights := transforms.k_feedback) is None:
        return
    if transforms.k_forward.shape[0] != heads:
        raise ValueError("k_feedback goes with a k_forward of each head, not with a shared one")
    fits = weights.shape == (heads, dk, dk) and weights.dtype == torch.float16
    if not (fits and weights.is_contiguous()):
        raise ValueError(
            f"k_feedback {tuple(weights.shape)} {weights.dtype}: contiguous [{heads}, {dk}, {dk}]"
            " float16 needed"
        )


def _check_query(query: Tensor, key: Tensor, dim: int) -> None:
    tokens, heads = key.shape[:2]
    fits = len(query) == tokens and query.shape[1] % heads == 0 and query.shape[2] == dim
    if not fits or query.dtype != key.dtype:
        raise ValueError(
            f"query {tuple(query.shape)} {query.dtype} does not fit key {tuple(key.shape)}"
            f" {key.dtype}"
        )
    if query.stride(2) != 1:
        raise ValueError("query needs adjacent channels")


def quantize_rows(
    x: Tensor, spec: QuantSpec, feedback: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `quantizer.quantize` of `[..., heads, T, head_dim]`, but for rounding ties; in plain torch
    it is some launches for every channel. `dtype` is of the affine parameters."""
    from oscar_kernels.kv_write.slot_kernel import _quantize_rows_kernel

    rows, (heads, tokens) = x.float().contiguous(), x.shape[-3:-1]
    codes = torch.empty(*x.shape[:-1], code_bytes(spec), dtype=torch.uint8, device=x.device)
    affine = torch.empty(*x.shape[:-1], spec.num_groups, 2, dtype=dtype, device=x.device)
    if rows.numel():
        _quantize_rows_kernel[(-(-tokens // 32), rows.shape[:-2].numel())](
            rows, codes, affine, feedback.contiguous(), tokens, heads,
            D=spec.head_dim, QUARTER=_triton.quarter(spec), GROUPS=spec.num_groups, BITS=spec.bits,
            RANK=clip_rank(spec), LANE_COLUMNS=1 if _triton.interpreted() else 8,
            LARGEST=torch.finfo(dtype).max, ROWS=32, num_warps=4,
        )  # fmt: skip
    return codes, affine
