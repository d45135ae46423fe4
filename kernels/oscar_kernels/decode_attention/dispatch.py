"""Decode attention on a GPU: CUDA C++ where it can be compiled and is faster, else Triton. Latents
(MLA) have kernels of their own.

Both paths take the same arguments and the same workspace, and their results are equal up to
rounding. When the CUDA path would be faster and cannot be taken, a warning says why, once for each
reason.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.chips import Target
from oscar_kernels.decode_attention import cuda as cuda_launcher
from oscar_kernels.decode_attention import latent, latent_cuda
from oscar_kernels.decode_attention import launcher as triton_launcher
from oscar_kernels.decode_attention.variant import misfit, variant
from oscar_kernels.nvrtc import Build
from oscar_kernels.reference import signature_of

logger = logging.getLogger(__name__)
WIDEST = 256
"""Channels of the widest rows that CUDA C++ has. Wider ones are Triton's, and no one is told."""


@signature_of(triton_launcher.decode_attention)
def decode_attention(query: Tensor, cache: LayerCache, batch: BatchView, **options: Any) -> Tensor:
    """One query token per request over all its cached tokens, or its drafts; see
    `reference.decode_attention`.

    Args:
        workspace: at least `decode_workspace_numel` elements; allocated for this call by default.
    """
    if cache.latent:
        return _over_latents(query, cache, batch, **options)
    if _too_wide(cache):
        return triton_launcher.decode_attention(query, cache, batch, **options)
    drafts, learned_sinks = options.get("drafts"), options.get("sink_logits") is not None
    reason = cuda_launcher.unsupported(query, cache, batch, drafts) or cuda_launcher.unbuildable(
        query, cache, batch, options.get("logit_cap", 0.0), drafts, learned_sinks=learned_sinks
    )
    if not reason:
        return cuda_launcher.decode_attention(query, cache, batch, checked=True, **options)
    _tell(reason)
    return triton_launcher.decode_attention(query, cache, batch, **options)


def _over_latents(query: Tensor, cache: LayerCache, batch: BatchView, **options: Any) -> Tensor:
    if options.get("drafts") is None and options.get("sink_logits") is None:
        cap = options.get("logit_cap", 0.0)
        if latent_cuda.unsupported(query, cache, batch, cap) is None:
            reason = latent_cuda.unbuildable(query, cache, batch)
            if not reason:
                return latent_cuda.decode_attention(query, cache, batch, **options)
            _tell(reason)
    return latent.decode_attention(query, cache, batch, **options)


def in_triton(cache: LayerCache) -> Callable[..., Tensor]:
    """`decode_attention` in Triton for such rows."""
    return latent.decode_attention if cache.latent else triton_launcher.decode_attention


def beside_cuda(query: Tensor, cache: LayerCache, batch: BatchView, **options: Any) -> None:
    """What a call that runs in CUDA C++ launches in Triton besides, so that it can be compiled."""
    if cache.latent:
        latent_cuda.decode_attention(query, cache, batch, stage1=False, **options)


def planned(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    gpu: Target,
    *,
    logit_cap: float = 0.0,
    sink_logits: Tensor | None = None,
    drafts: Drafts | None = None,
) -> Build | None:
    """What `decode_attention` of these tensors would compile in CUDA C++ for a GPU; `None` where it
    runs in Triton.

    Args:
        query, cache, batch, logit_cap, sink_logits, drafts: of the call, on any device.
    """
    if cache.latent:
        misfits = latent_cuda.misfit(query, cache, batch, logit_cap)
        return None if misfits else latent_cuda.build(batch, query.shape[1], gpu)
    if _too_wide(cache) or misfit(query, cache, batch, drafts):
        return None
    learned_sinks = sink_logits is not None
    made = variant(query, cache, batch, logit_cap, drafts=drafts, learned_sinks=learned_sinks)
    try:
        return cuda_launcher.build(made, gpu)
    except cuda_launcher.NoAttentionVariant:
        return None


def decode_workspace_numel(
    cache: LayerCache, num_q_heads: int, max_batch: int, drafts: int = 1
) -> int:
    """Workspace size in float32 elements, for decode batches up to `max_batch` requests on either
    path, with as many `drafts` each; none is as one."""
    if cache.latent:
        both = latent.decode_workspace_numel, latent_cuda.decode_workspace_numel
        return max(numel(cache, num_q_heads, max_batch) for numel in both)
    triton = triton_launcher.decode_workspace_numel(cache, num_q_heads, max_batch * drafts)
    if not cache.codes.is_cuda:
        return triton
    return max(triton, cuda_launcher.decode_workspace_numel(cache, num_q_heads, max_batch, drafts))


def _too_wide(cache: LayerCache) -> bool:
    return max(cache.k_spec.head_dim, cache.v_spec.head_dim) > WIDEST


@functools.cache
def _tell(reason: str) -> None:
    logger.warning("INT2 decode attention runs in Triton, not in CUDA C++: %s", reason)
