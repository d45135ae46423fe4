"""Writing new tokens by `write.cu`: checks, compilation, launch.

A new token and KV head costs `2 (Dk + Dv)` bytes to read and a record to write; at head_dim 128 and
both clips that is a third of the time. The rest is matrix products and what follows them, which
hardly overlap (kernels/measurements.md).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.chips import WRITE
from oscar_kernels.kv_write.arguments import check
from oscar_kernels.kv_write.cuda.parameters import arguments
from oscar_kernels.kv_write.cuda.variant import STEP_ROWS, WriteVariant, misfit, variant
from oscar_kernels.kv_write.reference import Parts
from oscar_kernels.kv_write.tuning import WARPGROUPS
from oscar_kernels.nvrtc import compile as nvrtc
from oscar_kernels.nvrtc import driver

SOURCE = nvrtc.CudaSource(__name__.rpartition(".")[0], "write.cu")


class NoWriteVariant(ValueError):
    """The CUDA kernel does not do this; the message says what and why, in one line."""


def unsupported(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    targets: TokenTargets,
    *,
    query: Tensor | None = None,
    query_out: Tensor | None = None,
    rows_out: tuple[Tensor, Tensor] | None = None,
) -> str | None:
    """Why the CUDA kernel cannot run these, in one line; `None` if it can."""
    reason = misfit(key, value, cache, targets, query=query, query_out=query_out, rows_out=rows_out)
    if reason:
        return reason
    if key.device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, the keys are on {key.device.type}"
    if torch.cuda.get_device_capability(key.device) != WRITE:
        return f"needs compute capability 9.0, not {torch.cuda.get_device_name(key.device)}"
    return None


def unbuildable(cache: LayerCache, targets: TokenTargets) -> str | None:
    """Why the variant that these need cannot be compiled and loaded, in one line; `None` once it
    is."""
    return _build_failure(variant(cache, targets), cache.codes.device)


def write_kv_int2(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    *,
    windows: WindowState,
    parts: Parts = "all",
    query: Tensor | None = None,
    query_out: Tensor | None = None,
    rows_out: tuple[Tensor, Tensor] | None = None,
    warpgroups: int = WARPGROUPS,
    step: bool | None = None,
) -> Tensor | None:
    """As `reference.write_kv_int2`, in one launch on the current stream; the same bytes by either
    kernel.

    Nothing is allocated if `query_out` is given, after the first call with these transforms. Only
    their matrices are read while the kernel in front still runs.

    Args:
        warpgroups: of a block of the kernel for many rows.
        step: which kernel; by default the one for few rows where that makes a block for a
            multiprocessor at most. Rows of 256 channels have only that one.
    """
    check(key, value, cache, transforms, targets, query, rows_out)
    if query is not None and query_out is None:
        query_out = torch.empty_like(query, memory_format=torch.contiguous_format)
    reason = unsupported(
        key, value, cache, targets, query=query, query_out=query_out, rows_out=rows_out
    )
    made = variant(cache, targets, warpgroups)
    reason = reason or _build_failure(made, key.device)
    if reason:
        raise NoWriteVariant(f"the CUDA write kernel cannot run this: {reason}")
    if len(key):
        launch = arguments(
            key,
            value,
            cache,
            transforms,
            targets,
            windows,
            parts,
            query,
            query_out,
            rows_out,
            _sms(key.device),
            step,
        )
        kernel = _load(made, key.device)[launch.kernel]
        stream = torch.cuda.current_stream(key.device).cuda_stream
        shared = made.shared_bytes(step=launch.step)
        kernel.launch((launch.blocks, 1), launch.parameters, stream, shared=shared, early=True)
    return query_out


@cache
def _build_failure(made: WriteVariant, device: torch.device) -> str | None:
    try:
        _load(made, device)
    except (nvrtc.CompilerMissing, nvrtc.CompilationFailed, driver.DriverError) as error:
        return " ".join(str(error).split())
    return None


def build(made: WriteVariant, version: int) -> nvrtc.Build:
    """How a variant is compiled for `WRITE` and a version of the driver."""
    return nvrtc.Build.of(SOURCE, made.flags, "sm_{}{}a".format(*WRITE), version)


@cache
def _load(made: WriteVariant, device: torch.device) -> dict[str, driver.Kernel]:
    """Compile and load once per variant and device."""
    code = build(made, driver.version()).code()
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        many = 128 * made.warpgroups
        threads = {} if made.wide else {"oscar_write": many, "oscar_write_slots": many}
        threads["oscar_write_step"] = 32 * STEP_ROWS
        loaded = dict(zip(threads, driver.load(code, threads), strict=True))
        for name, kernel in loaded.items():
            kernel.allow_shared(made.shared_bytes(step=name == "oscar_write_step"))
    return loaded


@cache
def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
