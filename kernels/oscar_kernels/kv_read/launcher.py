"""Reading cached tokens back as transformed rows, in one Triton launch."""

from __future__ import annotations

from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.kv_read.tuning import ReadTiles, read_tiles
from oscar_kernels.spec import QuantSpec


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
    _check(cache, batch, out_k, out_v)
    requests, heads = len(batch.rows), cache.num_kv_heads
    if not requests or not len(out_k):
        return
    from oscar_kernels.kv_read.kernel import _materialize_prefix_kernel

    k_quarter, v_quarter = _quarter(cache.k_spec), _quarter(cache.v_spec)
    tiles = tiles or read_tiles(max(cache.k_spec.head_dim, cache.v_spec.head_dim))
    _materialize_prefix_kernel[(-(-len(out_k) * heads // tiles.block_m),)](
        cache.codes,
        cache.affine,
        cache.ring_k,
        cache.ring_v,
        cache.sink_k,
        cache.sink_v,
        out_k,
        out_v,
        batch.kv_indptr,
        batch.kv_indices,
        batch.rows,
        batch.windows.sink_block,
        batch.windows.sink_from,
        batch.windows.ring_start,
        batch.kv_indptr if first is None else first,
        batch.kv_indptr if out_indptr is None else out_indptr,
        len(out_k),
        requests,
        requests.bit_length(),
        HEADS=heads,
        DK=cache.k_spec.head_dim,
        DV=cache.v_spec.head_dim,
        QUARTER_K=k_quarter,
        QUARTER_V=v_quarter,
        GROUPS_K=cache.k_spec.num_groups,
        GROUPS_V=cache.v_spec.num_groups,
        BITS_K=cache.k_spec.bits,
        BITS_V=cache.v_spec.bits,
        RECENT=cache.recent,
        RING=max(1, cache.ring_rows),
        SINK=cache.sink,
        FIRST=first is not None,
        BLOCK_M=tiles.block_m,
        num_warps=tiles.warps,
    )


def _quarter(spec: QuantSpec) -> int:
    """Channels of a quarter, padded to a power of two."""
    return 1 << (spec.head_dim // 4 - 1).bit_length()


def _check(cache: LayerCache, batch: BatchView, out_k: Tensor, out_v: Tensor) -> None:
    reason = _triton.missing(out_k.device)
    if reason is not None:
        raise ValueError(reason)
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
