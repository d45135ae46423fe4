"""Split-KV attention with Triton: checks, tiles, two or three launches. See `reference` for what is
computed.

Bound by the memory's read bandwidth: a cached token costs `code_bytes + 4 * groups` bytes per KV
head for K and the same for V, 72 at head_dim 128 and group 128, and 4 bytes of slot number per
request; 512 per head inside the windows. Nothing reads device data on the host, and grids depend on
shapes only, so a CUDA graph can hold a call; give it the `workspace` and `out` then.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.decode_attention import tuning
from oscar_kernels.decode_attention.workspace import Workspace, numel

LARGEST_GROUP = 16
LARGEST_HEAD = 256
MOST_REQUESTS = 1024
"""Most requests of one extend, because every program searches for its own among all."""
FEWEST_COMPILED = 64
"""Requests of the smallest compiled extend kernel, so that most batches share one kernel."""

UNDO_PRECISION = {torch.float32: "ieee", torch.float16: "tf32x3", torch.bfloat16: "tf32"}
"""Precision of the product with the value partner, by output type.

TensorFloat32 alone keeps no more bits than float16.
"""


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    o_partner: Tensor | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    prefix_stable: bool = False,
) -> Tensor:
    """One query token per request over all its cached tokens; see `reference.decode_attention`.

    Args:
        query: `[B, Hq, Dk]`, rows contiguous.
        o_partner: float32.
        workspace: at least `decode_workspace_numel` elements; allocated for this call by default.
        prefix_stable: unused; this kernel starts after the kernel in front has ended.

    Raises:
        ValueError: shapes that do not fit or are not supported, or no Triton on this device.
    """
    tiles = _decode_tiles(cache, query.shape[0], query.shape[1], query.device)
    if out is None:
        out = query.new_empty(*query.shape[:2], cache.v_spec.head_dim)
    _check(query, cache, batch, out, o_partner)
    scratch = workspace or Workspace.allocate(_elements(query, cache, tiles), query.device)
    partial, lse, merged = scratch.parts(
        query.shape[0] * query.shape[1], _splits(tiles), cache.v_spec.head_dim
    )
    if query.shape[0]:
        _stage1(query, None, cache, batch, tiles, (partial, lse), (sm_scale, logit_cap))
        _stage2((partial, lse, merged), cache, out, None, o_partner, _splits(tiles))
    return out


def extend_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    qo_indptr: Tensor,
    sm_scale: float,
    logit_cap: float = 0.0,
    o_partner: Tensor | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New tokens over their request's cached prefix and themselves; see
    `reference.extend_attention`.

    Made for 2 to 256 new tokens per request. Tokens from `qo_indptr[B]` on are not written.

    Raises:
        ValueError: shapes that do not fit or are not supported, or no Triton on this device.
    """
    tokens, requests = query.shape[0], qo_indptr.numel() - 1
    tiles = _extend_tiles(cache, tokens, requests, query.shape[1], query.device)
    if out is None:
        out = query.new_empty(tokens, query.shape[1], cache.v_spec.head_dim)
    if lse is None:
        lse = query.new_empty(tokens, query.shape[1], dtype=torch.float32)
    _check(query, cache, batch, out, o_partner)
    _check_new(query, key, value, cache, qo_indptr, lse)
    scratch = workspace or Workspace.allocate(_elements(query, cache, tiles), query.device)
    partial, sums, merged = scratch.parts(
        tokens * query.shape[1], _splits(tiles), cache.v_spec.head_dim
    )
    if tokens and requests:
        _stage1(
            query,
            (key, value, qo_indptr),
            cache,
            batch,
            tiles,
            (partial, sums),
            (sm_scale, logit_cap),
        )
        _stage2(
            (partial, sums, merged), cache, out, (lse, qo_indptr[-1:]), o_partner, _splits(tiles)
        )
    return out, lse


def decode_workspace_numel(cache: LayerCache, num_q_heads: int, max_batch: int) -> int:
    """Workspace size in float32 elements, for decode batches up to `max_batch`."""
    device, head_dim = cache.codes.device, cache.v_spec.head_dim
    return max(
        numel(b * num_q_heads, _splits(_decode_tiles(cache, b, num_q_heads, device)), head_dim)
        for b in range(1, max_batch + 1)
    )


def extend_workspace_numel(cache: LayerCache, num_q_heads: int, max_tokens: int) -> int:
    """Workspace size in float32 elements, for extends of up to `max_tokens` new tokens in all."""
    device, head_dim = cache.codes.device, cache.v_spec.head_dim
    return max(
        numel(t * num_q_heads, _splits(_extend_tiles(cache, t, 1, num_q_heads, device)), head_dim)
        for t in range(1, max_tokens + 1)
    )


def _decode_tiles(
    cache: LayerCache, batch: int, num_q_heads: int, device: torch.device
) -> tuning.AttentionTiles:
    return tuning.decode_tiles(
        batch=max(1, batch),
        num_kv_heads=cache.num_kv_heads,
        group=max(1, num_q_heads // cache.num_kv_heads),
        head_dim=max(cache.k_spec.head_dim, cache.v_spec.head_dim),
        exact=cache.sink + cache.recent,
        sms=_multiprocessors(device),
    )


def _extend_tiles(
    cache: LayerCache, tokens: int, requests: int, num_q_heads: int, device: torch.device
) -> tuning.AttentionTiles:
    return tuning.extend_tiles(
        tokens=max(1, tokens),
        requests=requests,
        num_kv_heads=cache.num_kv_heads,
        group=max(1, num_q_heads // cache.num_kv_heads),
        head_dim=max(cache.k_spec.head_dim, cache.v_spec.head_dim),
        exact=cache.sink + cache.recent,
        sms=_multiprocessors(device),
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; one under the interpreter, which runs programs one by one."""
    return (
        int(torch.cuda.get_device_properties(device).multi_processor_count)
        if device.type == "cuda"
        else 1
    )


def _splits(tiles: tuning.AttentionTiles) -> int:
    return tiles.splits + tiles.exact_splits + (tiles.tokens > 0)


def _elements(query: Tensor, cache: LayerCache, tiles: tuning.AttentionTiles) -> int:
    return numel(query.shape[0] * query.shape[1], _splits(tiles), cache.v_spec.head_dim)


def _stage1(
    query: Tensor,
    new: tuple[Tensor, Tensor, Tensor] | None,
    cache: LayerCache,
    batch: BatchView,
    tiles: tuning.AttentionTiles,
    results: tuple[Tensor, Tensor],
    logits: tuple[float, float],
) -> None:
    from oscar_kernels.decode_attention.kernel import _attention_stage1_kernel

    key, value, qo_indptr = new or (cache.ring_k[0], cache.ring_v[0], batch.kv_indptr)
    heads, group = cache.num_kv_heads, query.shape[1] // cache.num_kv_heads
    requests = qo_indptr.numel() - 1
    blocks = -(-query.shape[0] // tiles.tokens) + requests if tiles.tokens else query.shape[0]
    windows = batch.windows
    _attention_stage1_kernel[(heads, _splits(tiles), blocks)](
        query,
        cache.codes.view(torch.int16),
        cache.affine.view(torch.int32),
        batch.kv_indices,
        batch.kv_indptr,
        batch.rows,
        windows.sink_block,
        windows.sink_from,
        windows.ring_start,
        cache.sink_k,
        cache.sink_v,
        cache.ring_k,
        cache.ring_v,
        key,
        value,
        qo_indptr,
        *results,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        logits[0],
        logits[1] / math.log(2),
        requests,
        tiles.splits,
        tiles.exact_splits,
        H=heads,
        G=group,
        DK=cache.k_spec.head_dim,
        DV=cache.v_spec.head_dim,
        GK=cache.k_spec.num_groups,
        GV=cache.v_spec.num_groups,
        SINK=cache.sink,
        RECENT=max(1, cache.recent),
        HAS_RING=cache.recent > 0,
        REQUESTS=max(FEWEST_COMPILED, 1 << max(0, requests - 1).bit_length()),
        TOKENS=tiles.tokens,
        M=tiles.rows,
        BLOCK_N=tiles.block_n,
        EXACT_BLOCK_N=tiles.exact_block_n,
        STAGES=tiles.stages,
        HALF=query.dtype != torch.float32 and not _triton.interpreted(),
        BF16=cache.affine.dtype == torch.bfloat16,
        CAPPED=logits[1] > 0,
        PDL=_triton.dependent_launch(query.device),
        num_warps=tiles.num_warps,
        maxnreg=tiles.registers,
    )


def _stage2(
    scratch: tuple[Tensor, Tensor, Tensor],
    cache: LayerCache,
    out: Tensor,
    extend: tuple[Tensor, Tensor] | None,
    o_partner: Tensor | None,
    splits: int,
) -> None:
    from oscar_kernels.decode_attention.merge_kernel import (
        _merge_stage2_kernel,
        _undo_stage2_kernel,
    )

    partial, sums, merged = scratch
    lse, end = extend or (sums, sums)
    tokens, heads, head_dim = out.shape
    target = out if o_partner is None else merged.view(tokens, heads, head_dim)
    step, block, warps = tuning.merge_tiles(splits)
    chained = (
        {"PDL": True, "launch_pdl": True}
        if _triton.dependent_launch(out.device)
        else {"PDL": False}
    )
    _merge_stage2_kernel[(-(-head_dim // block), heads, tokens)](
        partial,
        sums,
        target,
        lse,
        end,
        *target.stride()[:2],
        heads,
        splits,
        DV=head_dim,
        BLOCK_S=step,
        BLOCK_D=block,
        EXTEND=extend is not None,
        **chained,
        num_warps=warps,
    )
    if o_partner is None:
        return
    group, lines, width = heads // cache.num_kv_heads, 16, 32
    _undo_stage2_kernel[(-(-head_dim // width), cache.num_kv_heads, -(-tokens * group // lines))](
        merged,
        o_partner,
        out,
        end,
        o_partner.stride(0) if o_partner.shape[0] > 1 else 0,
        *out.stride()[:2],
        tokens,
        H=cache.num_kv_heads,
        G=group,
        DV=head_dim,
        BLOCK_M=lines,
        BLOCK_J=width,
        BLOCK_D=max(16, 1 << (head_dim - 1).bit_length()),
        EXTEND=extend is not None,
        PRECISION=UNDO_PRECISION[out.dtype],
        **chained,
        num_warps=4,
    )


def _check(
    query: Tensor, cache: LayerCache, batch: BatchView, out: Tensor, o_partner: Tensor | None
) -> None:
    reason = _triton.missing(query.device)
    if reason:
        raise ValueError(f"the Triton path cannot run: {reason}")
    heads, dk, dv = cache.num_kv_heads, cache.k_spec.head_dim, cache.v_spec.head_dim
    if query.dim() != 3 or query.shape[2] != dk or query.shape[1] % heads:
        raise ValueError(
            f"query is {tuple(query.shape)}; [tokens, a multiple of {heads}, {dk}] is needed"
        )
    if not 1 <= query.shape[1] // heads <= LARGEST_GROUP:
        raise ValueError(
            f"{query.shape[1] // heads} query heads per KV head; 1 to {LARGEST_GROUP} are supported"
        )
    for head_dim in (dk, dv):
        if head_dim % 8 or head_dim > LARGEST_HEAD:
            raise ValueError(f"head_dim {head_dim} is not a multiple of 8 up to {LARGEST_HEAD}")
    if tuple(out.shape) != (*query.shape[:2], dv):
        raise ValueError(f"out is {tuple(out.shape)}, not {(*query.shape[:2], dv)}")
    if o_partner is not None and (
        tuple(o_partner.shape[1:]) != (dv, dv) or o_partner.shape[0] not in (1, heads)
    ):
        raise ValueError(f"o_partner is {tuple(o_partner.shape)}, not [1 or {heads}, {dv}, {dv}]")
    if (
        query.stride(2) != 1
        or out.stride(2) != 1
        or (o_partner is not None and not o_partner.is_contiguous())
    ):
        raise ValueError("rows of query and out, and all of o_partner, must be contiguous")
    for x in (
        cache.codes,
        cache.affine,
        cache.ring_k,
        cache.ring_v,
        cache.sink_k,
        cache.sink_v,
        batch.kv_indices,
    ):
        if not x.is_contiguous():
            raise ValueError(
                "the tensors of a cache and `kv_indices` of a batch must be contiguous"
            )


def _check_new(
    query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, qo_indptr: Tensor, lse: Tensor
) -> None:
    heads = cache.num_kv_heads
    if lse.shape != query.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(
            f"lse is {lse.dtype} {tuple(lse.shape)}, not contiguous float32"
            f" {tuple(query.shape[:2])}"
        )
    for name, x, head_dim in (
        ("key", key, cache.k_spec.head_dim),
        ("value", value, cache.v_spec.head_dim),
    ):
        if tuple(x.shape) != (query.shape[0], heads, head_dim) or x.stride(2) != 1:
            raise ValueError(
                f"{name} is {tuple(x.shape)}; [{query.shape[0]}, {heads}, {head_dim}], rows"
                " contiguous"
            )
    if not 1 <= qo_indptr.numel() - 1 <= MOST_REQUESTS:
        raise ValueError(
            f"{qo_indptr.numel() - 1} requests in one extend; 1 to {MOST_REQUESTS} are supported"
        )
