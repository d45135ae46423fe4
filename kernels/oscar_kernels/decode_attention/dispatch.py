"""Decode attention on a GPU: CUDA C++ where it can be compiled and has the shape, else Triton.

Both paths take the same arguments and the same workspace, and their results are equal up to
rounding. When the CUDA path is not taken, a warning says why, once for each reason.
"""

from __future__ import annotations

import functools
import logging

from torch import Tensor

from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.decode_attention import launcher as triton_launcher
from oscar_kernels.decode_attention.cuda import launcher as cuda_launcher
from oscar_kernels.decode_attention.workspace import Workspace

logger = logging.getLogger(__name__)


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    o_partner: Tensor | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    prefix_stable: bool = False,
) -> Tensor:
    """One query token per request over all its cached tokens; see `reference.decode_attention`.

    Args:
        workspace: at least `decode_workspace_numel` elements; allocated for this call by default.

    Raises:
        ValueError: neither path can run this, or tensors do not fit.
    """
    reason = cuda_launcher.unsupported(query, cache, batch) or cuda_launcher.unbuildable(
        query, cache, batch, logit_cap
    )
    if reason:
        _tell(reason)
        path = triton_launcher.decode_attention
    else:
        path = cuda_launcher.decode_attention
    return path(
        query,
        cache,
        batch,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        o_partner=o_partner,
        workspace=workspace,
        out=out,
        prefix_stable=prefix_stable,
    )


def decode_workspace_numel(cache: LayerCache, num_q_heads: int, max_batch: int) -> int:
    """Workspace size in float32 elements, for decode batches up to `max_batch` on either path."""
    triton = triton_launcher.decode_workspace_numel(cache, num_q_heads, max_batch)
    if not cache.codes.is_cuda:
        return triton
    return max(triton, cuda_launcher.decode_workspace_numel(cache, num_q_heads, max_batch))


@functools.cache
def _tell(reason: str) -> None:
    logger.warning("INT2 decode attention runs in Triton, not in CUDA C++: %s", reason)
