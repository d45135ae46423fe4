"""Decode attention in CUDA C++, compiled at first use by NVRTC: the fast path of sm_80 and
later."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from oscar_kernels import _triton, nvrtc
from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.chips import Target
from oscar_kernels.decode_attention.launcher import Workspace, check_sink_logits
from oscar_kernels.decode_attention.tuning import CUDA, MOST_RESIDENT, WHOLE_DIM, CudaTiles
from oscar_kernels.decode_attention.variant import (
    WARP_ROWS,
    WARPS,
    WIDE_WARP_ROWS,
    AttentionVariant,
    exclusive_bytes,
    fitting,
    misfit,
    ring_bytes,
    sharing,
    too_large,
    variant,
)

SOURCE = nvrtc.CudaSource(__name__.rpartition(".")[0], "decode.cu")
LOG2E = 1.4426950408889634

MERGED_ROWS = {24: 1.5, 16: 0.9, 8: 0.9, 4: 0.9, 2: 0.9, 1: 0.0}
"""Rows that a block of stage 2 may merge, mapped to the blocks for each multiprocessor that this
needs; the first that has them is taken. A multiprocessor holds two blocks at a time. Measured with
batches of 1 to 256 requests."""


SEGMENT = 16
"""Numbers of a `Segment` of work.cuh."""


class NoAttentionVariant(ValueError):
    """The CUDA kernel does not do this; the message says what and why, in one line."""


@dataclass(frozen=True)
class _Loaded:
    plan: nvrtc.Kernel
    stage1: nvrtc.Kernel
    stage2: dict[int, nvrtc.Kernel]
    shared: int
    grid: int
    early: bool
    shares: tuple[object, ...]  # what a plan depends on, beside the batch


def unsupported(
    query: Tensor, cache: LayerCache, batch: BatchView, drafts: Drafts | None = None
) -> str | None:
    """Why the CUDA kernel cannot run these, in one line; `None` if it can."""
    return misfit(query, cache, batch, drafts) or _triton.without_cuda(query.device)


@cache
def _build_failure(made: AttentionVariant, device: torch.device) -> str | None:
    try:
        return nvrtc.failure(lambda: _load(made, device))
    except NoAttentionVariant as error:
        return str(error)


def unbuildable(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    logit_cap: float = 0.0,
    drafts: Drafts | None = None,
    *,
    learned_sinks: bool = False,
) -> str | None:
    """Why the variant that these need cannot be compiled and loaded, in one line; `None` once it
    is."""
    made = variant(query, cache, batch, logit_cap, drafts=drafts, learned_sinks=learned_sinks)
    return _build_failure(made, query.device)


def decode_workspace_numel(
    cache: LayerCache, num_q_heads: int, max_batch: int, drafts: int = 1
) -> int:
    """Workspace size in float32 elements, for decode batches up to `max_batch` requests with as
    many `drafts` each; none is as one."""
    return sum(_parts(cache, num_q_heads * drafts, max_batch))


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
    tiles: CudaTiles = CUDA,
    checked: bool = False,
) -> Tensor:
    """As `reference.decode_attention`; two launches on the current stream, safe in a CUDA graph,
    and a third one where there is no plan yet.

    Args:
        query: `[B, Hq, Dk]` bfloat16, float16 or float32, contiguous.
        sink_logits: float32, `[B, Hq]` or `[B * n, Hq]`, any strides.
        o_partner: float32, contiguous.
        workspace: at least `decode_workspace_numel` elements; allocated for this call by default.
        out: `[B, Hq, Dv]`, contiguous, of the dtype of the query; made by default.
        prefix_stable, drafts: as in the reference; the mask is contiguous.
        same_batch: as in the reference; if false, which block takes which tokens is worked out
            first. If true, from sm_90 on, `kv_indices` and a mask are read while the kernel in
            front still runs.
    """
    if not checked:
        _refuse(unsupported(query, cache, batch, drafts))
    if out is None:
        out = query.new_empty(*query.shape[:2], cache.v_spec.head_dim)
    count = drafts.count if drafts else 1
    requests, heads = query.shape[0] // count, cache.num_kv_heads
    sizes = _parts(cache, query.shape[1] * count, requests)
    if workspace is None:
        workspace = Workspace.allocate(sum(sizes), query.device)
    check_sink_logits(query, sink_logits)
    _refuse(_misfit(query, cache, batch, o_partner, workspace, out, sum(sizes)))
    if requests == 0:
        return out
    made = variant(
        query, cache, batch, logit_cap, tiles, drafts, learned_sinks=sink_logits is not None
    )
    loaded = _load(made, query.device)
    rows = query.shape[0] * (query.shape[1] // heads)
    places = _triton.multiprocessors(query.device)
    merged, blocks = merge_grid(rows, heads, made, places)
    parameters = arguments(
        query, cache, batch,
        sm_scale=sm_scale, logit_cap=logit_cap, sink_logits=sink_logits, o_partner=o_partner,
        scratch=workspace.scratch[: sum(sizes)].split(sizes), out=out, prefix_stable=prefix_stable,
        drafts=drafts, blocks=loaded.grid,
    )  # fmt: skip
    stream = torch.cuda.current_stream(query.device).cuda_stream
    lists = batch.kv_indptr.data_ptr(), batch.rows.data_ptr()
    holds = loaded.shares, lists, *sizes, requests, heads, cache.recent, cache.sink
    known = same_batch and workspace.holds == holds
    workspace.holds = holds
    if not known:
        loaded.plan.launch((1, 1), parameters, stream, shared=8 * requests + 4, early=False)
    early = loaded.early and known
    loaded.stage1.launch((loaded.grid, 1), parameters, stream, shared=loaded.shared, early=early)
    loaded.stage2[merged].launch(
        (blocks, heads), parameters, stream, shared=made.partner_bytes, early=loaded.early
    )
    return out


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise NoAttentionVariant(f"the CUDA decode kernel cannot run this: {reason}")


def _misfit(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    partner: Tensor | None,
    workspace: Workspace,
    out: Tensor,
    needed: int,
) -> str | None:
    names = ("codes", "affine", "ring_k", "ring_v", "sink_k", "sink_v")
    named = {"query": query, "out": out, **dict(zip(names, cache.stores, strict=True))}
    named |= {name: getattr(batch, name) for name in ("kv_indptr", "kv_indices", "rows")}
    named |= {} if partner is None else {"o_partner": partner}
    strided = next((name for name, x in named.items() if not x.is_contiguous()), None)
    if strided:
        return f"{strided} is not contiguous"
    if workspace.scratch.numel() < needed:
        return f"the workspace holds {workspace.scratch.numel()} elements; this call needs {needed}"
    dim = cache.v_spec.head_dim
    if out.dtype != query.dtype or out.shape != (*query.shape[:2], dim):
        return f"out is {out.dtype} {tuple(out.shape)}"
    fits = (1, dim, dim), (cache.num_kv_heads, dim, dim)
    if partner is not None and (partner.dtype != torch.float32 or partner.shape not in fits):
        return f"o_partner is {partner.dtype} {tuple(partner.shape)}"
    wrong = (x.dtype for x in batch.windows.tensors if x.dtype != torch.int32)
    return next((f"window state of {dtype}, not int32" for dtype in wrong), None)


def build(made: AttentionVariant, target: Target) -> nvrtc.Build:
    """How a variant is compiled for a GPU."""
    fitted = fitting(made, target.shared_bytes)
    _refuse(too_large(fitted, target.shared_bytes))
    return nvrtc.Build.of(SOURCE, fitted.flags, target.arch, target.driver)


@cache
def _load(made: AttentionVariant, device: torch.device) -> _Loaded:
    """Compile and load once per variant and device."""
    target, properties = _triton.target(device), torch.cuda.get_device_properties(device)
    wanted = build(made, target)
    code = wanted.code()
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        threads = {f"oscar_decode_stage2_{n}": 512 if n == 1 else 256 for n in MERGED_ROWS}
        threads = {"oscar_decode_plan": 32 * WARPS, "oscar_decode_stage1": 32 * WARPS} | threads
        plan, stage1, *stage2 = nvrtc.load(code, threads)
        for one in stage2:
            one.allow_shared(made.partner_bytes)
        flags = dict(wanted.flags)
        ring = ring_bytes(flags)
        stage1.allow_shared(ring)
        resident = max(1, min(made.resident, stage1.blocks_per_multiprocessor(ring)))
        least = exclusive_bytes(properties.shared_memory_per_multiprocessor, resident)
        stage1.allow_shared(max(ring, least))
    grid = resident * _triton.multiprocessors(device)
    return _Loaded(
        plan,
        stage1,
        dict(zip(MERGED_ROWS, stage2, strict=True)),
        max(ring, least),
        grid,
        target.capability >= (9, 0),
        (grid, *(flags[name] for name in ("HB", "TW", "DRAFTS", "WINDOW_COST", "START"))),
    )


def _parts(cache: LayerCache, rows: int, requests: int) -> list[int]:
    blocks = MOST_RESIDENT * _triton.multiprocessors(cache.codes.device)
    return scratch_sizes(cache, rows, requests, blocks)


def merge_grid(rows: int, heads: int, made: AttentionVariant, places: int) -> tuple[int, int]:
    """Rows that a block of stage 2 merges, and blocks for each KV head.

    Where blocks of one row were more than multiprocessors, which have no room for two of them, a
    block merges two rows. A multiprocessor has room for one of several slices.

    Args:
        rows: query rows of a KV head, of all requests.
    """
    blocks = heads * made.slices  # of the same rows
    least = places / made.slices
    found = next(n for n, x in MERGED_ROWS.items() if -(-rows // n) * blocks >= x * least)
    found = 2 if found == 1 and rows * blocks > places else found
    return found, -(-rows // found) * made.slices


class Params(ctypes.Structure):
    """`Params` of state.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "codes", "affine", "ring_k", "ring_v", "sink_k", "sink_v", "indptr", "slots",
            "rows", "sink_block", "sink_from", "ring_start", "partial", "stats", "plan", "out",
            "partner",
        )),
        ("scale", ctypes.c_float), ("cap", ctypes.c_float),
        *((name, ctypes.c_int) for name in (
            "batch", "heads", "recent", "sink", "partner_heads", "blocks", "code_stride",
            "affine_stride", "prefix_stable", "ring_rows",
        )),
        ("mask", ctypes.c_void_p), ("sink_logits", ctypes.c_void_p),
        ("sink_logits_token", ctypes.c_int), ("sink_logits_head", ctypes.c_int),
    )  # fmt: skip


def scratch_sizes(cache: LayerCache, rows: int, requests: int, blocks: int) -> list[int]:
    """Elements of the partial results, of their statistics, and of a plan, for `rows` query rows of
    a request and up to `blocks` blocks; enough for twice as many warps of a KV head as need be."""
    heads = cache.num_kv_heads
    rows //= heads
    wide = max(cache.k_spec.head_dim, cache.v_spec.head_dim) > WHOLE_DIM
    shares = sharing(rows, WIDE_WARP_ROWS if wide else WARP_ROWS)
    each = -(-rows // shares)
    each += each % 2  # half of them, rounded up, for twice as many warps
    together, fewest = (math.gcd(heads, max(1, WARPS // n)) for n in (shares, 2 * shares))
    stored = (blocks * together + 2 * heads * requests) * shares * each
    parts = heads // fewest * requests
    plan = SEGMENT * 2 * (blocks + parts) + parts + 1
    return [stored * cache.v_spec.head_dim, 2 * stored, plan]


def arguments(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    sm_scale: float,
    logit_cap: float,
    sink_logits: Tensor | None,
    o_partner: Tensor | None,
    scratch: tuple[Tensor, ...],
    out: Tensor,
    prefix_stable: bool,
    drafts: Drafts | None,
    blocks: int,
) -> Params:
    """The parameters of both stages.

    Args:
        scratch: float32, of `scratch_sizes`.
    """
    lists = batch.kv_indptr, batch.kv_indices, batch.rows
    tensors = (query, *cache.stores, *lists, *batch.windows.tensors, *scratch, out)
    return Params(
        *(x.data_ptr() for x in tensors), None if o_partner is None else o_partner.data_ptr(),
        sm_scale * LOG2E * (2 / logit_cap if logit_cap else 1), logit_cap * LOG2E,
        query.shape[0] // (drafts.count if drafts else 1), cache.num_kv_heads, cache.recent,
        cache.sink, 0 if o_partner is None else o_partner.shape[0], blocks, cache.codes[0].nbytes,
        cache.affine[0].nbytes, prefix_stable, cache.ring_rows,
        None if drafts is None or drafts.mask is None else drafts.mask.data_ptr(),
        None if sink_logits is None else sink_logits.data_ptr(),
        *((0, 0) if sink_logits is None else sink_logits.stride()),
    )  # fmt: skip
