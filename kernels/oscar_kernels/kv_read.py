"""Reading cached tokens back as transformed rows, in one Triton launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import BatchView, LayerCache


@dataclass(frozen=True)
class ReadTiles:
    """How one launch is cut.

    Attributes:
        block_m: lines (a token and a KV head) of a program.
        warps: warps of a program.
    """

    block_m: int
    warps: int


def read_tiles(head_dim: int) -> ReadTiles:
    """One warp and few lines per program, because stores need many programs in flight."""
    return ReadTiles(block_m=16 if head_dim <= 256 else 8, warps=1)


def materialize_prefix(
    cache: LayerCache,
    batch: BatchView,
    *,
    out_k: Tensor,
    out_v: Tensor,
    first: Tensor | None = None,
    out_indptr: Tensor | None = None,
    tiles: ReadTiles | None = None,
) -> None:
    """Write the transformed rows of cached tokens, packed by request; see
    `reference.materialize_prefix`.

    The values are the reference's. The grid follows from the outputs' capacity, so no device value
    is read on the host. Limited by memory: a token and KV head reads a record and writes
    `2 (Dk + Dv)` bytes.
    """
    _triton.require(out_k.device)
    _check(cache, batch, out_k, out_v)
    requests, heads = len(batch.rows), cache.num_kv_heads
    if not requests or not len(out_k):
        return
    from oscar_kernels.kv_read_kernel import _materialize_prefix_kernel

    k_quarter, v_quarter = _triton.quarter(cache.k_spec), _triton.quarter(cache.v_spec)
    tiles = tiles or read_tiles(max(cache.k_spec.head_dim, cache.v_spec.head_dim))
    _materialize_prefix_kernel[(-(-len(out_k) * heads // tiles.block_m),)](
        *cache.stores, out_k, out_v, batch.kv_indptr, batch.kv_indices, batch.rows,
        *batch.windows.tensors, batch.kv_indptr if first is None else first,
        batch.kv_indptr if out_indptr is None else out_indptr,
        len(out_k), requests, requests.bit_length(),
        HEADS=heads, DK=cache.k_spec.head_dim, DV=cache.v_spec.head_dim, QUARTER_K=k_quarter,
        QUARTER_V=v_quarter, GROUPS_K=cache.k_spec.num_groups, GROUPS_V=cache.v_spec.num_groups,
        BITS_K=cache.k_spec.bits, BITS_V=cache.v_spec.bits, RECENT=cache.recent,
        RING=max(1, cache.ring_rows), SINK=cache.sink, FIRST=first is not None,
        BLOCK_M=tiles.block_m, num_warps=tiles.warps,
    )  # fmt: skip


def _check(cache: LayerCache, batch: BatchView, out_k: Tensor, out_v: Tensor) -> None:
    tokens, heads = len(out_k), cache.num_kv_heads
    for name, out, spec in (("out_k", out_k, cache.k_spec), ("out_v", out_v, cache.v_spec)):
        if out.shape != (tokens, heads, spec.head_dim) or not out.is_contiguous():
            raise ValueError(
                f"{name} {tuple(out.shape)}: contiguous [tokens, {heads}, {spec.head_dim}] needed"
            )
    if len(batch.kv_indptr) != len(batch.rows) + 1:
        raise ValueError(
            f"{len(batch.kv_indptr)} entries of kv_indptr for {len(batch.rows)} requests"
        )
