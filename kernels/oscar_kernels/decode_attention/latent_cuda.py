"""Stage 1 of the decode attention over latents (MLA) in CUDA C++, for rows of DeepSeek's width and
chips with a copy engine; compiled at first use by NVRTC."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from oscar_kernels import _triton, nvrtc
from oscar_kernels.cache import BatchView, LayerCache

SOURCE = nvrtc.CudaSource(__name__.rpartition(".")[0], "latent.cu")
HEADS, THREADS, RESIDENT, STAGES = 16, 128, 2, 4
LOG2E = 1.4426950408889634
TYPES = {torch.int32: "int", torch.int64: "long long"}


class Params(ctypes.Structure):
    """As in `latent.cu`."""

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


def flags(
    cache: LayerCache, batch: BatchView, stages: int = STAGES, resident: int = RESIDENT
) -> dict[str, str | int]:
    """What is compiled in."""
    return {
        "SLOT_T": TYPES[batch.kv_indices.dtype],
        "INDPTR_T": TYPES[batch.kv_indptr.dtype],
        "ROW_T": TYPES[batch.rows.dtype],
        "STAGES": stages,
        "RESIDENT": resident,
    }


def shared_bytes(stages: int = STAGES, slot: int = 4) -> int:
    """Of a block: tiles, weights, what warps agree on, barriers, digits of the query, slots."""
    tiles, weights, digits = stages * 64 * 272, 2 * 4 * 64 * 48, 4 * 4 * 32 * 16
    agreed = 4 * HEADS * 4 + (stages + 1) // 2 * 16
    return tiles + weights + agreed + digits + 4 * HEADS * 4 * 3 + stages * 64 * slot


def arguments(
    query: Tensor, cache: LayerCache, batch: BatchView, scratch: tuple[Tensor, Tensor],
    sm_scale: float, splits: tuple[int, int],
) -> Params:  # fmt: skip
    """What a launch is given.

    Args:
        scratch: partial outputs and their lse, of the windows' splits first.
        splits: of codes, and of windows.
    """
    tensors = (
        query, cache.codes, cache.affine, cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v,
        batch.kv_indptr, batch.kv_indices, batch.rows, *batch.windows.tensors, *scratch,
    )  # fmt: skip
    heads = query.shape[1]
    return Params(
        *(x.data_ptr() for x in tensors), *query.stride()[:2], sm_scale * LOG2E, heads,
        -(-heads // HEADS), *splits, cache.sink, cache.recent, max(1, cache.ring_rows),
    )  # fmt: skip


@cache
def loaded(device: torch.device, made: tuple[tuple[str, str | int], ...], shared: int) -> nvrtc.Kernel:
    target = _triton.target(device)
    code = nvrtc.Build.of(SOURCE, dict(made), target.arch, target.driver).code()
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        (kernel,) = nvrtc.load(code, {"oscar_latent_stage1": THREADS})
        kernel.allow_shared(shared)
    return kernel
