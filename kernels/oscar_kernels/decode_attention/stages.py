"""Launches of the two stages of split-KV attention in Triton.

Stage 1 gives a partial output and an lse per split. Stage 2 merges them and undoes the transform of
values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.decode_attention import tuning

FEWEST_COMPILED = 64
"""Requests of the smallest compiled extend kernel, so that most batches share one kernel."""
UNDO_PRECISION = {torch.float32: "ieee", torch.float16: "tf32x3", torch.bfloat16: "tf32"}
"""Precision of the product with the value partner, by output type.

TensorFloat32 alone keeps no more bits than float16.
"""


def launch_stage1(
    query: Tensor,
    new: tuple[Tensor, Tensor, Tensor] | None,
    cache: LayerCache,
    batch: BatchView,
    tiles: tuning.AttentionTiles,
    results: tuple[Tensor, Tensor],
    logits: tuple[float, float],
    drafts: Drafts | None = None,
) -> None:
    """Attend, one program per KV head, split and block of query tokens.

    Args:
        query: `[tokens, Hq, Dk]`.
        new: `key`, `value` and `qo_indptr` of an extend; `None` for decode.
        drafts: of a decode step, one query token each.
    """
    from oscar_kernels.decode_attention.kernel import _attention_stage1_kernel

    key, value, qo_indptr = new or (cache.ring_k[0], cache.ring_v[0], batch.kv_indptr)
    heads, group = cache.num_kv_heads, query.shape[1] // cache.num_kv_heads
    requests = qo_indptr.numel() - 1
    blocks = -(-query.shape[0] // tiles.tokens) + requests if tiles.tokens else query.shape[0]
    windows = batch.windows
    mask = None if drafts is None else drafts.mask
    _attention_stage1_kernel[(heads, tiles.partials, blocks)](
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
        windows.sink_block if mask is None else mask,
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
        BK=cache.k_spec.bits,
        BV=cache.v_spec.bits,
        SINK=cache.sink,
        RECENT=cache.recent,
        RING=max(1, cache.ring_rows),
        REQUESTS=max(FEWEST_COMPILED, 1 << max(0, requests - 1).bit_length()),
        TOKENS=tiles.tokens,
        DRAFTS=0 if drafts is None else drafts.count,
        TREE=mask is not None,
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


def launch_stage2(
    scratch: tuple[Tensor, Tensor, Tensor],
    cache: LayerCache,
    out: Tensor,
    extend: tuple[Tensor, Tensor] | None,
    o_partner: Tensor | None,
    splits: int,
    sink_logits: Tensor | None = None,
) -> None:
    """Merge the splits into `out`, then undo the transform of values if there is `o_partner`.

    Args:
        extend: `lse` to write, and the number of tokens on the device; `None` for decode.
        splits: of each query row.
        sink_logits: `[tokens, Hq]` of a decode step, or `None`.
    """
    from oscar_kernels.decode_attention.merge_kernel import (
        _merge_stage2_kernel,
        _undo_stage2_kernel,
    )

    partial, sums, merged = scratch
    lse, end = extend or (sums, sums)
    tokens, heads, head_dim = out.shape
    target = out if o_partner is None else merged.view(tokens, heads, head_dim)
    sink = sums if sink_logits is None else sink_logits
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
        sink,
        *target.stride()[:2],
        *((0, 0) if sink_logits is None else sink_logits.stride()),
        heads,
        splits,
        DV=head_dim,
        BLOCK_S=step,
        BLOCK_D=block,
        EXTEND=extend is not None,
        SINK=sink_logits is not None,
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
