"""Checks of the arguments of the Triton launchers: device, shapes, types and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import MOST_DRAFTS, BatchView, Drafts, LayerCache

LARGEST_GROUP = 16
LARGEST_HEAD = 512
MOST_REQUESTS = 1024
"""Most requests of one extend, because every program searches for its own among all."""


def check(
    query: Tensor, cache: LayerCache, batch: BatchView, out: Tensor, o_partner: Tensor | None
) -> None:
    """Check what decode and extend share; shapes as in `reference`."""
    reason = _triton.missing(query.device)
    if reason:
        raise ValueError(f"the Triton path cannot run: {reason}")
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
    for x in (
        cache.codes,
        cache.affine,
        cache.ring_k,
        cache.ring_v,
        cache.sink_k,
        cache.sink_v,
        batch.kv_indices,
    ):
        if not x.is_contiguous():
            raise ValueError(
                "the tensors of a cache and `kv_indices` of a batch must be contiguous"
            )


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
    for name, x, head_dim in (
        ("key", key, cache.k_spec.head_dim),
        ("value", value, cache.v_spec.head_dim),
    ):
        if tuple(x.shape) != (query.shape[0], heads, head_dim) or x.stride(2) != 1:
            raise ValueError(
                f"{name} is {tuple(x.shape)}; [{query.shape[0]}, {heads}, {head_dim}], rows"
                " contiguous"
            )
    if not 1 <= qo_indptr.numel() - 1 <= MOST_REQUESTS:
        raise ValueError(
            f"{qo_indptr.numel() - 1} requests in one extend; 1 to {MOST_REQUESTS} are supported"
        )
