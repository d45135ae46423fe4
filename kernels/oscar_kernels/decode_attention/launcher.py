"""Split-KV attention with Triton: checks, tiles, two or three launches. See `reference` for what is
computed.

Bound by the memory's read bandwidth: a cached token costs `code_bytes + 4 * groups` bytes per KV
head for K and the same for V, 72 at head_dim 128 and group 128, and 4 bytes of slot number per
request; 512 per head inside the windows. Nothing reads device data on the host, and grids depend on
shapes only, so a CUDA graph can hold a call; give it the `workspace` and `out` then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.decode_attention import tuning
from oscar_kernels.decode_attention.arguments import (
    check,
    check_drafts,
    check_new,
    check_sink_logits,
)
from oscar_kernels.decode_attention.stages import launch_stage1, launch_stage2
from oscar_kernels.decode_attention.workspace import Workspace, numel


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    sink_logits: Tensor | None = None,
    o_partner: Tensor | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    prefix_stable: bool = False,
    drafts: Drafts | None = None,
) -> Tensor:
    """One query token per request over all its cached tokens, or its drafts; see
    `reference.decode_attention`.

    Args:
        query: `[B, Hq, Dk]` or `[B * n, Hq, Dk]`, rows contiguous.
        sink_logits: float32, `[B, Hq]` or `[B * n, Hq]`.
        o_partner: float32.
        workspace: at least `decode_workspace_numel` elements; allocated for this call by default.
        prefix_stable: unused; this kernel starts after the kernel in front has ended.
        drafts: every node is a query of its own, which reads the codes of all sure tokens.
    """
    tiles = _decode_tiles(cache, query.shape[0], query.shape[1], query.device)
    if out is None:
        out = query.new_empty(*query.shape[:2], cache.v_spec.head_dim)
    check(query, cache, batch, out, o_partner)
    check_sink_logits(query, sink_logits)
    check_drafts(query, cache, batch, drafts)
    scratch = workspace or Workspace.allocate(_elements(query, cache, tiles), query.device)
    partial, lse, merged = scratch.parts(
        query.shape[0] * query.shape[1], tiles.partials, cache.v_spec.head_dim
    )
    if query.shape[0]:
        launch_stage1(
            query, None, cache, batch, tiles, (partial, lse), (sm_scale, logit_cap), drafts
        )
        launch_stage2(
            (partial, lse, merged), cache, out, None, o_partner, tiles.partials, sink_logits
        )
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
    """
    tokens, requests = query.shape[0], qo_indptr.numel() - 1
    tiles = _extend_tiles(cache, tokens, requests, query.shape[1], query.device)
    if out is None:
        out = query.new_empty(tokens, query.shape[1], cache.v_spec.head_dim)
    if lse is None:
        lse = query.new_empty(tokens, query.shape[1], dtype=torch.float32)
    check(query, cache, batch, out, o_partner)
    check_new(query, key, value, cache, qo_indptr, lse)
    scratch = workspace or Workspace.allocate(_elements(query, cache, tiles), query.device)
    partial, sums, merged = scratch.parts(
        tokens * query.shape[1], tiles.partials, cache.v_spec.head_dim
    )
    if tokens and requests:
        launch_stage1(
            query,
            (key, value, qo_indptr),
            cache,
            batch,
            tiles,
            (partial, sums),
            (sm_scale, logit_cap),
        )
        launch_stage2(
            (partial, sums, merged), cache, out, (lse, qo_indptr[-1:]), o_partner, tiles.partials
        )
    return out, lse


def decode_workspace_numel(cache: LayerCache, num_q_heads: int, max_batch: int) -> int:
    """Workspace size in float32 elements, for decode batches up to `max_batch`; requests times
    drafts."""
    device, head_dim = cache.codes.device, cache.v_spec.head_dim
    return max(
        numel(b * num_q_heads, _decode_tiles(cache, b, num_q_heads, device).partials, head_dim)
        for b in range(1, max_batch + 1)
    )


def extend_workspace_numel(cache: LayerCache, num_q_heads: int, max_tokens: int) -> int:
    """Workspace size in float32 elements, for extends of up to `max_tokens` new tokens in all."""
    device, head_dim = cache.codes.device, cache.v_spec.head_dim
    return max(
        numel(t * num_q_heads, _extend_tiles(cache, t, 1, num_q_heads, device).partials, head_dim)
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
        sms=_triton.multiprocessors(device),
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
        sms=_triton.multiprocessors(device),
    )


def _elements(query: Tensor, cache: LayerCache, tiles: tuning.AttentionTiles) -> int:
    return numel(query.shape[0] * query.shape[1], tiles.partials, cache.v_spec.head_dim)
