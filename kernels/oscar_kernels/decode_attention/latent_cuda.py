"""Decode attention over latents (MLA) whose stage 1 is CUDA C++: rows of 512 and 64 channels, as
DeepSeek has them, compiled at first use by NVRTC. Stage 2 is that of the kernels in Triton."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oscar_kernels import _triton, nvrtc
from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.chips import Target
from oscar_kernels.decode_attention import launcher
from oscar_kernels.decode_attention.latent import MOST_SPLITS, check
from oscar_kernels.decode_attention.launcher import Workspace

SOURCE = nvrtc.CudaSource(__name__.rpartition(".")[0], "latent.cu")
LOG2E = 1.4426950408889634
LATENT, ROTARY, GROUPS = 512, 64, 4
TILE, THREADS, STAGES, RESIDENT = 64, 128, 3, 2
"""Codes of a step, threads and stages of a block, and blocks of a multiprocessor, as in
`latent.cu`."""
COSTS = {8: 0.78, 16: 1.0, 24: 1.35}
"""Query heads that a block may have, and the time that this takes on an H200; 24 take 1.28, and a
bit more is said so that 64 and 128 heads have blocks of 16, with which they were timed."""
USUAL_TILES, BLOCK_COST = 128, 5
"""What a split is chosen for: tiles of a request, and what beginning and ending a block costs, in
tiles. Host code does not know how long requests are."""


def misfit(
    query: Tensor, cache: LayerCache, batch: BatchView, logit_cap: float = 0.0
) -> str | None:
    """Why this kernel has no variant for these, in one line; `None` if it has."""
    widths = cache.out_dim, cache.v_spec.head_dim, cache.k_spec.num_groups
    stores = {x.dtype for x in cache.stores[2:]}
    if widths != (LATENT, ROTARY, GROUPS):
        return f"rows of {widths[0]} and {widths[1]} channels in {widths[2]} groups"
    if stores | {query.dtype} != {torch.bfloat16} or cache.affine.dtype != torch.float16:
        return f"a {query.dtype} query and {cache.affine.dtype} scales"
    if query.stride(0) % 4 or query.stride(1) % 4 or query.data_ptr() % 8:
        return "a query that is not aligned to 8 bytes"
    lists = (batch.kv_indptr, batch.kv_indices, batch.rows)
    if not {x.dtype for x in lists} <= _triton.INTEGERS.keys():
        return "lists of other types than int32 and int64"
    return "logits with a cap" if logit_cap else None


def unsupported(
    query: Tensor, cache: LayerCache, batch: BatchView, logit_cap: float = 0.0
) -> str | None:
    """As `misfit`, and for a device that cannot run it."""
    return _triton.without_cuda(query.device) or misfit(query, cache, batch, logit_cap)


def unbuildable(query: Tensor, cache: LayerCache, batch: BatchView) -> str | None:
    """Why it cannot be compiled and loaded, in one line; `None` once it is."""
    each = heads_of_a_block(query.shape[1])
    return _failure(tuple(flags(batch, each).items()), query.device)


@cache
def _failure(made: tuple[tuple[str, str | int], ...], device: torch.device) -> str | None:
    return nvrtc.failure(lambda: _load(made, device))


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    sm_scale: float,
    o_partner: Tensor | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    stage1: bool = True,
    **_: Any,
) -> Tensor:
    """As `latent.decode_attention`, which has the other options; of calls that are supported.

    Args:
        stage1: whether the kernel in CUDA C++ is launched, or only what is Triton's, to compile it.
    """
    if out is None:
        out = query.new_empty(*query.shape[:2], cache.out_dim)
    check(query, cache, batch, out, o_partner)
    requests, heads = query.shape[:2]
    each = heads_of_a_block(heads)
    shared = splits(requests, heads, _triton.multiprocessors(query.device))
    size = requests * heads, sum(shared), LATENT
    scratch = workspace or Workspace.allocate(launcher.numel(*size), query.device)
    partial, sums, merged = scratch.parts(*size)
    if not requests:
        return out
    if stage1:
        kernel, early = _load(tuple(flags(batch, each).items()), query.device)
        kernel.launch(
            (-(-heads // each) * sum(shared), requests),
            arguments(query, cache, batch, (partial, sums), sm_scale, shared, each),
            torch.cuda.current_stream(query.device).cuda_stream,
            shared=shared_bytes(batch.kv_indices.element_size(), each),
            early=early,
        )
    launcher.merge((partial, sums, merged), cache, out, None, o_partner, sum(shared))
    return out


def decode_workspace_numel(cache: LayerCache, num_q_heads: int, max_batch: int) -> int:
    """Workspace size in float32 elements, for decode batches up to `max_batch`."""
    sms = _triton.multiprocessors(cache.codes.device)
    return max(
        launcher.numel(b * num_q_heads, sum(splits(b, num_q_heads, sms)), cache.out_dim)
        for b in range(1, max_batch + 1)
    )


def heads_of_a_block(heads: int) -> int:
    """How many query heads of so many a block has."""
    return min(COSTS, key=lambda each: -(-heads // each) * COSTS[each])


@cache
def splits(requests: int, heads: int, sms: int) -> tuple[int, int]:
    """Blocks that share the codes of a request and a block of heads, and those that share its
    windows: those that end first where requests are as long as is usual."""
    blocks, places = max(1, requests) * -(-heads // heads_of_a_block(heads)), RESIDENT * sms

    def cost(number: int) -> float:
        return -(-blocks * number // places) * (USUAL_TILES / (number - 1) + BLOCK_COST)

    number = min(range(2, max(2, min(MOST_SPLITS, places)) + 1), key=cost)
    exact = min(max(1, number // 12), 5)
    return number - exact, exact


def flags(batch: BatchView, each: int) -> dict[str, str | int]:
    """What is compiled in, for so many query heads of a block."""
    return {
        "SLOT_T": _triton.INTEGERS[batch.kv_indices.dtype],
        "INDPTR_T": _triton.INTEGERS[batch.kv_indptr.dtype],
        "ROW_T": _triton.INTEGERS[batch.rows.dtype],
        "TILES": each // 8,
    }


def shared_bytes(slot: int, each: int) -> int:
    """Of a block: tiles, weights, what warps agree on, barriers, digits of the query and what warps
    say of it, and slots of so many bytes."""
    tiles, weights = STAGES * TILE * 272, 2 * GROUPS * TILE * (16 if each == 8 else 48)
    agreed = 4 * each * 4 + (STAGES + 1) // 2 * 16
    return tiles + weights + agreed + each * LATENT + 3 * 4 * each * 4 + STAGES * TILE * slot


def build(batch: BatchView, heads: int, target: Target) -> nvrtc.Build:
    """How it is compiled for a GPU."""
    made = flags(batch, heads_of_a_block(heads))
    return nvrtc.Build.of(SOURCE, made, target.arch, target.driver)


@cache
def _load(
    made: tuple[tuple[str, str | int], ...], device: torch.device
) -> tuple[nvrtc.Kernel, bool]:
    """The kernel, and whether it may be launched before the one in front has ended."""
    target = _triton.target(device)
    code = nvrtc.Build.of(SOURCE, dict(made), target.arch, target.driver).code()
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        (kernel,) = nvrtc.load(code, {"oscar_latent_stage1": THREADS})
        kernel.allow_shared(shared_bytes(8, 8 * int(dict(made)["TILES"])))
    return kernel, target.capability >= (9, 0)


class Params(ctypes.Structure):
    """`Params` of latent.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "codes", "affine", "sink_latent", "sink_rotary", "ring_latent", "ring_rotary",
            "indptr", "slots", "rows", "sink_block", "sink_from", "ring_start", "partial", "lse",
        )),
        ("query_token", ctypes.c_longlong), ("query_head", ctypes.c_longlong),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int) for name in (
            "heads", "head_blocks", "splits", "exact_splits", "sink", "recent", "ring",
        )),
    )  # fmt: skip


def arguments(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    scratch: tuple[Tensor, Tensor],
    sm_scale: float,
    shared: tuple[int, int],
    each: int,
) -> Params:
    """What a launch is given.

    Args:
        scratch: partial outputs and their lse, of the windows' splits first.
        shared: as of `splits`.
        each: query heads of a block.
    """
    tensors = (
        query, cache.codes, cache.affine, cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v,
        batch.kv_indptr, batch.kv_indices, batch.rows, *batch.windows.tensors, *scratch,
    )  # fmt: skip
    heads = query.shape[1]
    return Params(
        *(x.data_ptr() for x in tensors), *query.stride()[:2], sm_scale * LOG2E, heads,
        -(-heads // each), *shared, cache.sink, cache.recent, max(1, cache.ring_rows),
    )  # fmt: skip
