"""The parameters of `decode.cu`, as its C++ declares them."""

from __future__ import annotations

import ctypes
import math

from torch import Tensor

from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.decode_attention.cuda.variant import (
    WARP_ROWS,
    WARPS,
    WIDE_WARP_ROWS,
    sharing,
)
from oscar_kernels.decode_attention.tuning import WHOLE_DIM

LOG2E = 1.4426950408889634


class Params(ctypes.Structure):
    """`Params` of decode.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "query",
                "codes",
                "affine",
                "ring_k",
                "ring_v",
                "sink_k",
                "sink_v",
                "indptr",
                "slots",
                "rows",
                "sink_block",
                "sink_from",
                "ring_start",
                "partial",
                "stats",
                "prefix",
                "out",
                "partner",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        *(
            (name, ctypes.c_int)
            for name in (
                "batch",
                "heads",
                "recent",
                "sink",
                "partner_heads",
                "blocks",
                "code_stride",
                "affine_stride",
                "prefix_stable",
                "ring_rows",
            )
        ),
        ("mask", ctypes.c_void_p),
        ("sink_logits", ctypes.c_void_p),
        ("sink_logits_token", ctypes.c_int),
        ("sink_logits_head", ctypes.c_int),
    )


def scratch_sizes(cache: LayerCache, rows: int, requests: int, blocks: int) -> list[int]:
    """Elements of the partial results, of their statistics, and of the prefix sums of work, for
    `rows` query rows of a request and up to `blocks` blocks; enough for twice as many warps of a
    KV head as need be."""
    rows //= cache.num_kv_heads
    wide = max(cache.k_spec.head_dim, cache.v_spec.head_dim) > WHOLE_DIM
    shares = sharing(rows, WIDE_WARP_ROWS if wide else WARP_ROWS)
    parts = cache.num_kv_heads // math.gcd(cache.num_kv_heads, WARPS // shares)
    each = -(-rows // shares)
    each += each % 2  # half of them, rounded up, for twice as many warps
    stored = (blocks + 2 * parts * requests) * WARPS * each
    return [stored * cache.v_spec.head_dim, 2 * stored, 2 * requests + 1]


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
    tensors = (
        query,
        cache.codes,
        cache.affine,
        cache.ring_k,
        cache.ring_v,
        cache.sink_k,
        cache.sink_v,
        batch.kv_indptr,
        batch.kv_indices,
        batch.rows,
        batch.windows.sink_block,
        batch.windows.sink_from,
        batch.windows.ring_start,
        *scratch,
        out,
    )
    return Params(
        *(x.data_ptr() for x in tensors),
        None if o_partner is None else o_partner.data_ptr(),
        sm_scale * LOG2E * (2 / logit_cap if logit_cap else 1),
        logit_cap * LOG2E,
        query.shape[0] // (drafts.count if drafts else 1),
        cache.num_kv_heads,
        cache.recent,
        cache.sink,
        0 if o_partner is None else o_partner.shape[0],
        blocks,
        cache.codes[0].nbytes,
        cache.affine[0].nbytes,
        prefix_stable,
        cache.ring_rows,
        None if drafts is None or drafts.mask is None else drafts.mask.data_ptr(),
        None if sink_logits is None else sink_logits.data_ptr(),
        *((0, 0) if sink_logits is None else sink_logits.stride()),
    )
