"""The candidate of latent.cu in the place of stage 1 of the Triton kernel for latents.

Where it is measured and faster, it goes beside that kernel; until then nothing of the product uses
it. `decode_speed.py --only cuda` times it, and tests/kernels/test_latent_cuda.py has an emulator
run it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscar_kernels import _triton, nvrtc
from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.decode_attention import latent, launcher
from oscar_kernels.decode_attention.launcher import Workspace

HEADS, THREADS, LOG2E = 16, 128, 1.4426950408889634
STAGES = 3
TYPES = {torch.int32: "int", torch.int64: "long long"}


@dataclass(frozen=True)
class Source(nvrtc.CudaSource):
    """`latent.cu` beside this file, with the machine of the kernel for heads."""

    @cache  # noqa: B019
    def files(self) -> dict[str, str]:
        machine = resources.files("oscar_kernels.decode_attention") / "machine.cuh"
        own = Path(__file__).with_name(self.main)
        return {"machine.cuh": machine.read_text("utf-8"), self.main: own.read_text("utf-8")}


SOURCE = Source("contrib.mla", "latent.cu")


class Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "codes", "affine", "indptr", "slots", "rows", "sink_from", "ring_start",
            "partial", "lse",
        )),
        ("query_token", ctypes.c_longlong), ("query_head", ctypes.c_longlong),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int) for name in (
            "heads", "head_blocks", "splits", "exact_splits", "sink", "recent",
        )),
    )  # fmt: skip


def flags(
    cache: LayerCache, batch: BatchView, stages: int = STAGES, resident: int = 2
) -> dict[str, str | int]:
    return {
        "SLOT_T": TYPES[batch.kv_indices.dtype],
        "INDPTR_T": TYPES[batch.kv_indptr.dtype],
        "ROW_T": TYPES[batch.rows.dtype],
        "STAGES": stages,
        "RESIDENT": resident,
        "AFFINE_BF16": int(cache.affine.dtype == torch.bfloat16),
    }


def shared_bytes(stages: int = STAGES, resident: int = 2) -> int:
    """Of a block: tiles, weights, what warps agree on, barriers, and digits if they lie there."""
    tiles, weights, agreed = stages * 64 * (256 + 16), 2 * 4 * 64 * 48, 2 * 4 * (HEADS + 1) * 4
    return (tiles + weights + agreed + 8 * stages + 15) // 16 * 16 + (8192 if resident > 2 else 0)


def arguments(
    query: Tensor, cache: LayerCache, batch: BatchView, scratch: tuple[Tensor, Tensor],
    sm_scale: float, splits: tuple[int, int],
) -> Params:  # fmt: skip
    tensors = (
        query, cache.codes, cache.affine, batch.kv_indptr, batch.kv_indices, batch.rows,
        batch.windows.sink_from, batch.windows.ring_start, *scratch,
    )  # fmt: skip
    heads = query.shape[1]
    return Params(
        *(x.data_ptr() for x in tensors), *query.stride()[:2], sm_scale * LOG2E, heads,
        -(-heads // HEADS), *splits, cache.sink, cache.recent,
    )  # fmt: skip


@cache
def loaded(device: torch.device, made: tuple[tuple[str, Any], ...], shared: int) -> nvrtc.Kernel:
    target = _triton.target(device)
    code = nvrtc.Build.of(SOURCE, dict(made), target.arch, target.driver).code()
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        (kernel,) = nvrtc.load(code, {"oscar_latent_stage1": THREADS})
        kernel.allow_shared(shared)
    return kernel


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    sm_scale: float,
    workspace: Workspace,
    out: Tensor,
    stages: int = STAGES,
    resident: int = 2,
) -> Tensor:
    """As `oscar_kernels.decode_attention.latent.decode_attention` of a bfloat16 query, 512 channels
    in groups of 128 and rotary keys of 64. Windows are those of its Triton kernel."""
    from oscar_kernels.decode_attention.latent_kernel import _latent_stage1_kernel

    requests, heads = query.shape[:2]
    tiles = latent.latent_tiles(16)
    blocks = requests * -(-heads // HEADS)
    programs = max(8, _triton.multiprocessors(query.device) * resident // blocks)
    exact = min(max(1, programs // 12), 5)
    sizes = requests * heads, programs + exact, cache.out_dim
    partial, sums, merged = workspace.parts(*sizes)
    shared = shared_bytes(stages, resident)
    made = tuple(flags(cache, batch, stages, resident).items())
    kernel = loaded(query.device, made, shared)
    given = arguments(query, cache, batch, (partial, sums), sm_scale, (programs, exact))
    stream = torch.cuda.current_stream(query.device).cuda_stream
    columns = -(-heads // HEADS) * programs
    kernel.launch((columns, requests), given, stream, shared=shared, early=False)
    _latent_stage1_kernel[(-(-heads // tiles.heads), exact, requests)](
        query, cache.codes.view(torch.int16), cache.codes.view(torch.bfloat16),
        cache.affine.view(torch.int32), batch.kv_indices, batch.kv_indptr, batch.rows,
        *batch.windows.tensors, cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v, partial,
        sums, *query.stride()[:2], sm_scale, 0.0, heads, programs, exact, D=cache.out_dim,
        ROPE=cache.v_spec.head_dim, GROUPS=cache.k_spec.num_groups, SINK=cache.sink,
        RECENT=cache.recent, RING=max(1, cache.ring_rows), M=tiles.heads, BLOCK_N=tiles.block_n,
        EXACT_BLOCK_N=tiles.exact_block_n, STAGES=tiles.stages, HALF=True,
        BF16=cache.affine.dtype == torch.bfloat16, CAPPED=False,
        PDL=_triton.dependent_launch(query.device), num_warps=tiles.num_warps,
        maxnreg=tiles.registers,
    )  # fmt: skip
    launcher.merge((partial, sums, merged), cache, out, None, None, programs + exact)
    return out
