"""Decode attention over latents (MLA) with Triton: checks, tiles, two or three launches. See
`reference.decode_attention` for what is computed.

A cached token costs its record and its scales, 272 bytes with 512 channels and a rotary key of 64,
once for each block of query heads; the first block's reads leave them in the second-level cache for
the others. A head takes `2 * (2 * D + rotary)` operations for a token. Grids depend on shapes only,
so a CUDA graph can hold a call; give it the `workspace` and `out` then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.decode_attention import launcher
from oscar_kernels.decode_attention.launcher import Workspace

MOST_HEADS = 128
MOST_SPLITS = 512
LEAST_SPLITS = 8
"""Of a request, however many there are: else the windows' program ends last."""


@dataclass(frozen=True)
class LatentTiles:
    """How stage 1 is cut.

    Attributes:
        heads: query heads of a program.
        block_n: rows of codes that a program reads per step.
        exact_block_n: window rows that a program reads per step.
        num_warps, stages: of a program.
        resident: programs that a multiprocessor holds at a time, as far as registers and shared
            memory tell.
        registers: most registers of a thread; `None` leaves it to the compiler.
    """

    heads: int
    block_n: int
    exact_block_n: int
    num_warps: int
    stages: int
    resident: int
    registers: int | None = None


def latent_tiles(num_q_heads: int) -> LatentTiles:
    """Tiles for so many query heads: the fastest of five and of two that were timed on an H200."""
    if num_q_heads <= 16:
        return LatentTiles(16, 64, 32, 4, 4, 2)
    return LatentTiles(16, 64, 32, 8, 4, 2, 128)


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
    same_batch: bool = False,
    tiles: LatentTiles | None = None,
) -> Tensor:
    """One query token per request over all its cached tokens; see `reference.decode_attention`.

    Args:
        query: `[B, Hq, D + rotary]`, rows contiguous; `Hq` up to `MOST_HEADS`.
        sink_logits, drafts: not built for latents.
        prefix_stable, same_batch: unused; this kernel starts after the kernel in front has ended.
    """
    if drafts is not None or sink_logits is not None:
        raise ValueError("drafts and learned sinks are not built for latents")
    if out is None:
        out = query.new_empty(*query.shape[:2], cache.out_dim)
    check(query, cache, batch, out, o_partner)
    tiles = tiles or latent_tiles(query.shape[1])
    splits, exact = _splits(tiles, cache, *query.shape[:2])
    size = query.shape[0] * query.shape[1], splits + exact, cache.out_dim
    scratch = workspace or Workspace.allocate(launcher.numel(*size), query.device)
    partial, sums, merged = scratch.parts(*size)
    if not size[0]:
        return out
    from oscar_kernels.decode_attention.latent_kernel import _latent_stage1_kernel

    requests, heads = query.shape[:2]
    _latent_stage1_kernel[(-(-heads // tiles.heads), splits + exact, requests)](
        query, cache.codes.view(torch.int16), cache.codes.view(torch.bfloat16),
        cache.affine.view(torch.int32), batch.kv_indices, batch.kv_indptr, batch.rows,
        *batch.windows.tensors, cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v, partial,
        sums, *query.stride()[:2], sm_scale, logit_cap / math.log(2), heads, splits,
        exact, D=cache.out_dim, ROPE=cache.v_spec.head_dim, GROUPS=cache.k_spec.num_groups,
        SINK=cache.sink, RECENT=cache.recent, RING=max(1, cache.ring_rows), M=tiles.heads,
        BLOCK_N=tiles.block_n, EXACT_BLOCK_N=tiles.exact_block_n, STAGES=tiles.stages,
        HALF=query.dtype != torch.float32 and not _triton.interpreted(),
        BF16=cache.affine.dtype == torch.bfloat16, CAPPED=logit_cap > 0,
        PDL=_triton.dependent_launch(query.device), num_warps=tiles.num_warps,
        maxnreg=tiles.registers,
    )  # fmt: skip
    launcher.merge((partial, sums, merged), cache, out, None, o_partner, splits + exact)
    return out


def decode_workspace_numel(cache: LayerCache, num_q_heads: int, max_batch: int) -> int:
    """Workspace size in float32 elements, for decode batches up to `max_batch`."""
    tiles = latent_tiles(num_q_heads)
    return max(
        launcher.numel(b * num_q_heads, sum(_splits(tiles, cache, b, num_q_heads)), cache.out_dim)
        for b in range(1, max_batch + 1)
    )


def _splits(tiles: LatentTiles, cache: LayerCache, batch: int, heads: int) -> tuple[int, int]:
    """Programs that share the codes of a request, and those that share its windows."""
    sms = _triton.multiprocessors(cache.codes.device)
    blocks = max(1, batch) * -(-heads // tiles.heads)
    programs = min(MOST_SPLITS, max(LEAST_SPLITS, sms * tiles.resident // blocks))
    exact = min(max(1, programs // 12), -(-(cache.sink + cache.recent) // 64))
    return programs - exact, exact


def check(
    query: Tensor, cache: LayerCache, batch: BatchView, out: Tensor, o_partner: Tensor | None
) -> None:
    """Refuse what neither kernel for latents takes."""
    _triton.require(query.device)
    width, rotary = cache.out_dim, cache.v_spec.head_dim
    if query.dim() != 3 or query.shape[2] != width + rotary or query.stride(2) != 1:
        raise ValueError(
            f"query is {tuple(query.shape)}; [tokens, heads, {width} + {rotary}] with contiguous"
            " rows is needed"
        )
    if not 1 <= query.shape[1] <= MOST_HEADS:
        raise ValueError(f"{query.shape[1]} query heads; 1 to {MOST_HEADS} are supported")
    if query.shape[0] != len(batch.rows):
        raise ValueError(f"{query.shape[0]} query tokens for {len(batch.rows)} requests")
    for channels, least in ((width, 128), (rotary, 16)):
        if channels & (channels - 1) or not least <= channels <= launcher.LARGEST_HEAD:
            raise ValueError(
                f"rows of {width} and {rotary} channels; powers of two from 128 and from 16 up to"
                f" {launcher.LARGEST_HEAD} are supported"
            )
    if cache.k_spec.bits != 2:
        raise ValueError(f"latents with codes of {cache.k_spec.bits} bits; 2 are supported")
    launcher.check_layout(query, cache, batch, out, o_partner)
