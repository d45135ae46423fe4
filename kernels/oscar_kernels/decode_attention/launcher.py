"""Split-KV attention with Triton: checks, tiles, two or three launches. See `reference` for what is
computed.

Bound by the memory's read bandwidth: a cached token costs `code_bytes + 4 * groups` bytes per KV
head for K and the same for V, 72 at head_dim 128 and group 128, and 4 bytes of slot number per
request; 512 per head inside the windows. Nothing reads device data on the host, and grids depend on
shapes only, so a CUDA graph can hold a call; give it the `workspace` and `out` then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import MOST_DRAFTS, BatchView, Drafts, LayerCache
from oscar_kernels.decode_attention import tuning

LARGEST_GROUP = 16
LARGEST_HEAD = 512
MOST_REQUESTS = 1024
"""Most requests of one extend, because every program searches for its own among all."""
FEWEST_COMPILED = 64
"""Requests of the smallest compiled extend kernel, so that most batches share one kernel."""
UNDO_PRECISION = {torch.float32: "ieee", torch.float16: "tf32x3", torch.bfloat16: "tf32"}
"""Precision of the product with the value partner, by output type. TensorFloat32 alone keeps no
more bits than float16."""


@dataclass(eq=False)
class Workspace:
    """Scratch of split-KV attention on one stream. Nothing in it outlives a call, but the plan of a
    step of the CUDA kernel.

    Attributes:
        scratch: float32, one dimension.
        holds: what the plan in it is for; `None` without one.
    """

    scratch: Tensor
    holds: object = None

    @classmethod
    def allocate(cls, numel: int, device: torch.device | str) -> Workspace:
        """Scratch of `numel` float32 elements; see `dispatch.decode_workspace_numel`."""
        return cls(torch.empty(numel, dtype=torch.float32, device=device))

    def parts(self, rows: int, splits: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Partial outputs, their lse, and merged outputs.

        Args:
            rows: query tokens times query heads.
        """
        self.holds, needed = None, numel(rows, splits, head_dim)
        if self.scratch.numel() < needed:
            raise ValueError(
                f"the workspace holds {self.scratch.numel()} elements; this call needs {needed}"
            )
        sizes = [rows * splits * head_dim, rows * splits, rows * head_dim]
        partial, lse, merged = self.scratch[:needed].split(sizes)
        return partial, lse, merged


def numel(rows: int, splits: int, head_dim: int) -> int:
    """Float32 elements that one call needs; arguments as for `Workspace.parts`."""
    return rows * (splits * (head_dim + 1) + head_dim)


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
        same_batch: unused.
    """
    tiles = _decode_tiles(cache, query.shape[0], query.shape[1])
    if out is None:
        out = query.new_empty(*query.shape[:2], cache.v_spec.head_dim)
    check(query, cache, batch, out, o_partner)
    check_sink_logits(query, sink_logits)
    check_drafts(query, cache, batch, drafts)
    softmax = (sm_scale, logit_cap)
    _run(query, cache, batch, tiles, softmax, o_partner, workspace, out, drafts, sink_logits)
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
    tiles = _extend_tiles(cache, tokens, requests, query.shape[1])
    if out is None:
        out = query.new_empty(tokens, query.shape[1], cache.v_spec.head_dim)
    if lse is None:
        lse = query.new_empty(tokens, query.shape[1], dtype=torch.float32)
    check(query, cache, batch, out, o_partner)
    check_new(query, key, value, cache, qo_indptr, lse)
    softmax, new = (sm_scale, logit_cap), (key, value, qo_indptr)
    _run(query, cache, batch, tiles, softmax, o_partner, workspace, out, new=new, lse=lse)
    return out, lse


def _run(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    tiles: tuning.AttentionTiles,
    softmax: tuple[float, float],
    o_partner: Tensor | None,
    workspace: Workspace | None,
    out: Tensor,
    drafts: Drafts | None = None,
    sink_logits: Tensor | None = None,
    new: tuple[Tensor, Tensor, Tensor] | None = None,
    lse: Tensor | None = None,
) -> None:
    """Both stages of a decode step, or of an extend with `new` and `lse`."""
    rows, head_dim = query.shape[0] * query.shape[1], cache.v_spec.head_dim
    scratch = workspace or Workspace.allocate(numel(rows, tiles.partials, head_dim), query.device)
    partial, sums, merged = scratch.parts(rows, tiles.partials, head_dim)
    if not rows:
        return
    _attend(query, new, cache, batch, tiles, (partial, sums), softmax, drafts)
    extend = None if new is None or lse is None else (lse, new[2][-1:])
    merge((partial, sums, merged), cache, out, extend, o_partner, tiles.partials, sink_logits)


def decode_workspace_numel(cache: LayerCache, num_q_heads: int, max_batch: int) -> int:
    """Workspace size in float32 elements, for decode batches up to `max_batch`; requests times
    drafts."""
    head_dim = cache.v_spec.head_dim
    return max(
        numel(b * num_q_heads, _decode_tiles(cache, b, num_q_heads).partials, head_dim)
        for b in range(1, max_batch + 1)
    )


def extend_workspace_numel(cache: LayerCache, num_q_heads: int, max_tokens: int) -> int:
    """Workspace size in float32 elements, for extends of up to `max_tokens` new tokens in all."""
    head_dim = cache.v_spec.head_dim
    return max(
        numel(t * num_q_heads, _extend_tiles(cache, t, 1, num_q_heads).partials, head_dim)
        for t in range(1, max_tokens + 1)
    )


def _decode_tiles(cache: LayerCache, batch: int, num_q_heads: int) -> tuning.AttentionTiles:
    return tuning.decode_tiles(batch=max(1, batch), **_shape(cache, num_q_heads))


def _extend_tiles(
    cache: LayerCache, tokens: int, requests: int, num_q_heads: int
) -> tuning.AttentionTiles:
    shape = _shape(cache, num_q_heads)
    return tuning.extend_tiles(tokens=max(1, tokens), requests=requests, **shape)


def _shape(cache: LayerCache, num_q_heads: int) -> dict[str, int]:
    """What tiles depend on besides the batch."""
    return {
        "num_kv_heads": cache.num_kv_heads,
        "group": max(1, num_q_heads // cache.num_kv_heads),
        "head_dim": max(cache.k_spec.head_dim, cache.v_spec.head_dim),
        "exact": cache.sink + cache.recent,
        "sms": _triton.multiprocessors(cache.codes.device),
    }


def _attend(
    query: Tensor,
    new: tuple[Tensor, Tensor, Tensor] | None,
    cache: LayerCache,
    batch: BatchView,
    tiles: tuning.AttentionTiles,
    results: tuple[Tensor, Tensor],
    softmax: tuple[float, float],
    drafts: Drafts | None = None,
) -> None:
    """Stage 1: one program per KV head, split and block of query tokens.

    Args:
        new: `key`, `value` and `qo_indptr` of an extend; `None` for decode.
    """
    from oscar_kernels.decode_attention.kernel import _attention_stage1_kernel

    key, value, qo_indptr = new or (cache.ring_k[0], cache.ring_v[0], batch.kv_indptr)
    heads, group = cache.num_kv_heads, query.shape[1] // cache.num_kv_heads
    requests = qo_indptr.numel() - 1
    blocks = -(-query.shape[0] // tiles.tokens) + requests if tiles.tokens else query.shape[0]
    windows = batch.windows
    mask = None if drafts is None else drafts.mask
    _attention_stage1_kernel[(heads, tiles.partials, blocks)](
        query, cache.codes.view(torch.int16), cache.affine.view(torch.int32), batch.kv_indices,
        batch.kv_indptr, batch.rows, windows.sink_block, windows.sink_from, windows.ring_start,
        cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v, key, value, qo_indptr,
        windows.sink_block if mask is None else mask, *results, *query.stride()[:2],
        *key.stride()[:2], *value.stride()[:2], softmax[0], softmax[1] / math.log(2), requests,
        tiles.splits, tiles.exact_splits,
        H=heads, G=group, DK=cache.k_spec.head_dim, DV=cache.v_spec.head_dim,
        GK=cache.k_spec.num_groups, GV=cache.v_spec.num_groups, BK=cache.k_spec.bits,
        BV=cache.v_spec.bits, SINK=cache.sink, RECENT=cache.recent, RING=max(1, cache.ring_rows),
        REQUESTS=max(FEWEST_COMPILED, 1 << max(0, requests - 1).bit_length()), TOKENS=tiles.tokens,
        DRAFTS=0 if drafts is None else drafts.count, TREE=mask is not None, M=tiles.rows,
        BLOCK_N=tiles.block_n, EXACT_BLOCK_N=tiles.exact_block_n, STAGES=tiles.stages,
        HALF=query.dtype != torch.float32 and not _triton.interpreted(),
        BF16=cache.affine.dtype == torch.bfloat16, CAPPED=softmax[1] > 0,
        PDL=_triton.dependent_launch(query.device), num_warps=tiles.num_warps,
    )  # fmt: skip


def merge(
    scratch: tuple[Tensor, Tensor, Tensor],
    cache: LayerCache,
    out: Tensor,
    extend: tuple[Tensor, Tensor] | None,
    o_partner: Tensor | None,
    splits: int,
    sink_logits: Tensor | None = None,
) -> None:
    """Stage 2: merge the splits into `out`, then undo the transform of values.

    Args:
        scratch: partial outputs, their lse, and merged outputs, as `Workspace.parts` gives them.
        extend: `lse` to write, and the number of tokens on the device; `None` for decode.
        splits: of each query row.
    """
    from oscar_kernels.decode_attention.kernel import _merge_stage2_kernel, _undo_stage2_kernel

    partial, sums, merged = scratch
    lse, end = extend or (sums, sums)
    tokens, heads, head_dim = out.shape
    target = out if o_partner is None else merged.view(tokens, heads, head_dim)
    sink = sums if sink_logits is None else sink_logits
    step, block, warps = tuning.merge_tiles(splits, head_dim)
    dependent = _triton.dependent_launch(out.device)
    chained = {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}
    _merge_stage2_kernel[(-(-head_dim // block), heads, tokens)](
        partial, sums, target, lse, end, sink, *target.stride()[:2],
        *((0, 0) if sink_logits is None else sink_logits.stride()), heads, splits,
        DV=head_dim, BLOCK_S=step, BLOCK_D=block, EXTEND=extend is not None,
        SINK=sink_logits is not None, **chained, num_warps=warps,
    )  # fmt: skip
    if o_partner is None:
        return
    group, lines, width = heads // cache.num_kv_heads, 16, 32
    _undo_stage2_kernel[(-(-head_dim // width), cache.num_kv_heads, -(-tokens * group // lines))](
        merged, o_partner, out, end, o_partner.stride(0) if o_partner.shape[0] > 1 else 0,
        *out.stride()[:2], tokens,
        H=cache.num_kv_heads, G=group, DV=head_dim, BLOCK_M=lines, BLOCK_J=width,
        BLOCK_D=max(16, 1 << (head_dim - 1).bit_length()), EXTEND=extend is not None,
        PRECISION=UNDO_PRECISION[out.dtype], **chained, num_warps=4,
    )  # fmt: skip


def check(
    query: Tensor, cache: LayerCache, batch: BatchView, out: Tensor, o_partner: Tensor | None
) -> None:
    """Check what decode and extend share; shapes as in `reference`."""
    _triton.require(query.device)
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
    check_layout(query, cache, batch, out, o_partner)


def check_layout(
    query: Tensor, cache: LayerCache, batch: BatchView, out: Tensor, o_partner: Tensor | None
) -> None:
    """Check `out` and `o_partner`, and what must be contiguous."""
    heads, dv = cache.num_kv_heads, cache.out_dim
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
    if not all(x.is_contiguous() for x in (*cache.stores, batch.kv_indices)):
        raise ValueError("the tensors of a cache and `kv_indices` of a batch must be contiguous")


def check_sink_logits(query: Tensor, sink_logits: Tensor | None) -> None:
    """Check the learned sinks of a decode step."""
    if sink_logits is None:
        return
    found = tuple(sink_logits.shape), sink_logits.dtype, sink_logits.device
    if found != (tuple(query.shape[:2]), torch.float32, query.device):
        raise ValueError(
            f"sink_logits are {found[0]} {found[1]} on {found[2]};"
            f" {tuple(query.shape[:2])} float32 on {query.device} are needed"
        )


def check_drafts(query: Tensor, cache: LayerCache, batch: BatchView, drafts: Drafts | None) -> None:
    """Check the drafts of a decode step, and that the ring has room for them."""
    count = 1 if drafts is None else drafts.count
    if query.shape[0] != count * len(batch.rows):
        raise ValueError(
            f"{query.shape[0]} query tokens for {len(batch.rows)} requests with {count} each"
        )
    if drafts is None:
        return
    if not 1 <= count <= min(MOST_DRAFTS, cache.recent, cache.ring_rows - cache.recent + 1):
        raise ValueError(
            f"{count} drafts: 1 to {MOST_DRAFTS} are supported, in a window of {cache.recent} and a"
            f" ring of {cache.ring_rows} rows"
        )
    mask = drafts.mask
    if mask is None:
        return
    found = tuple(mask.shape), mask.dtype, mask.device
    if found != ((query.shape[0],), torch.int32, query.device) or not mask.is_contiguous():
        raise ValueError(
            f"the mask of drafts is {found[0]} {found[1]} on {found[2]}; contiguous"
            f" [{query.shape[0]}] int32 on {query.device} is needed"
        )


def check_new(
    query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, qo_indptr: Tensor, lse: Tensor
) -> None:
    """Check the new tokens of an extend; shapes as in `reference.extend_attention`."""
    heads = cache.num_kv_heads
    if lse.shape != query.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(
            f"lse is {lse.dtype} {tuple(lse.shape)}, not contiguous float32"
            f" {tuple(query.shape[:2])}"
        )
    for name, x, spec in (("key", key, cache.k_spec), ("value", value, cache.v_spec)):
        head_dim = spec.head_dim
        if tuple(x.shape) != (query.shape[0], heads, head_dim) or x.stride(2) != 1:
            raise ValueError(
                f"{name} is {tuple(x.shape)}; [{query.shape[0]}, {heads}, {head_dim}], rows"
                " contiguous"
            )
    if not 1 <= qo_indptr.numel() - 1 <= MOST_REQUESTS:
        raise ValueError(
            f"{qo_indptr.numel() - 1} requests in one extend; 1 to {MOST_REQUESTS} are supported"
        )
