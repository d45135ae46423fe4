"""Writing new tokens on a GPU: CUDA C++ where it can be compiled and has the shape, else Triton. A
few latents (MLA) have a kernel of their own.

When the CUDA path is not taken on a GPU, a warning says why, once for each reason.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from torch import Tensor

from oscar_kernels import reference
from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.chips import WRITE, Target
from oscar_kernels.kv_write import cuda as cuda_launcher
from oscar_kernels.kv_write import latent
from oscar_kernels.kv_write import launcher as triton_launcher
from oscar_kernels.kv_write.cuda import has_matrices, misfit, variant
from oscar_kernels.kv_write.prepared import prepared
from oscar_kernels.nvrtc import Build
from oscar_kernels.reference import Parts, signature_of

logger = logging.getLogger(__name__)

VARIABLE = "OSCAR_KERNELS_CUDA_WRITE"
"""Environment variable; the value 0 disables the CUDA kernel."""


@signature_of(reference.write_kv_int2)
def write_kv_int2(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    **options: Any,
) -> Tensor | None:
    """Transform new tokens and write their INT2 slots, ring rows and sink rows; see
    `reference.write_kv_int2`.

    The variable must not change while a cache is in use: codes of the two kernels may differ at
    rounding ties.
    """
    given = key, value, cache, transforms, targets
    if not (key.is_cuda and wanted()):
        return triton_launcher.write_kv_int2(*given, **options)
    if not cache.latent:
        try:
            return cuda_launcher.write_kv_int2(*given, **options)
        except cuda_launcher.NoWriteVariant as error:
            _tell(str(error))
    elif latent.unsupported(key, value, cache, targets, **options) is None:
        reason = latent.unbuildable(key, latent.flags(cache, transforms, targets))
        if not reason:
            return latent.write_kv_int2(*given, **options)
        _tell(reason)
    return triton_launcher.write_kv_int2(*given, **options)


def planned(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    gpu: Target,
    *,
    windows: WindowState | None = None,
    parts: Parts = "all",
    **rows: Any,
) -> Build | None:
    """What `write_kv_int2` of these tensors would compile in CUDA C++ for a GPU; `None` where it
    runs in Triton.

    Args:
        key, value, cache, transforms, targets: on any device.
        windows, parts, rows: of the call; `query`, `query_out` and `rows_out`.
    """
    if not wanted():
        return None
    if cache.latent:
        misfits = latent.misfit(key, value, cache, targets, parts=parts, **rows)
        return None if misfits else latent.build(latent.flags(cache, transforms, targets), gpu)
    if gpu.capability != WRITE or misfit(key, value, cache, targets, **rows):
        return None
    return cuda_launcher.build(variant(cache, transforms, targets), gpu.driver)


def wanted() -> bool:
    """Whether the environment allows the CUDA kernel."""
    return os.environ.get(VARIABLE) != "0"


def prepare(transforms: Transforms) -> None:
    """Allocate now what the first write with these transforms would allocate.

    On a GPU that is at most the size of the transforms, and 32 bytes for each channel of a K
    matrix. On a CPU, and for channels that Triton writes, it is nothing.
    """
    if transforms.k_forward.is_cuda and wanted() and has_matrices(transforms):
        prepared(transforms)


@functools.cache
def _tell(reason: str) -> None:
    logger.warning("INT2 cache writes run in Triton, not in CUDA C++: %s", reason)
