"""Attention over an INT2 cache in plain torch: the definition that the kernels are tested against.

Every cached row is dequantized or taken from its window, then attention is dense, one request at a
time, in the dtype of the query: float64 queries make it the oracle. Rows are transformed already;
`o_partner` brings outputs back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kernels.cache import BatchView, Drafts, LayerCache
from oscar_kernels.kv_read.reference import cached_rows


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    sink_logits: Tensor | None = None,
    o_partner: Tensor | None = None,
    workspace: object = None,
    out: Tensor | None = None,
    prefix_stable: bool = False,
    drafts: Drafts | None = None,
) -> Tensor:
    """One query token per request over all its cached tokens, itself included; or all drafts of
    every request, each over what is sure and over its ancestors.

    Args:
        query: `[B, Hq, Dk]`, transformed; `[B * n, Hq, Dk]` with `n` drafts of each request.
        cache, batch: what is read; a request without tokens gets zeros.
        logit_cap: `c` for `c * tanh(logit / c)`; 0 for none.
        sink_logits: float32, `[B, Hq]` or `[B * n, Hq]`, any strides: a logit beside those of the
            tokens that takes its share of every softmax and has no value (learned sinks of
            gpt-oss).
        o_partner: `[1 | H, Dv, Dv]`; outputs become `o' @ o_partner^T`.
        workspace: unused; only launchers need one.
        out: `[B, Hq, Dv]` or `[B * n, Hq, Dv]`, written if given.
        prefix_stable: the caller promises that the kernel in front of this call on the same stream
            writes, of all rows that are read, only the newest token of each request, and that this
            token is read from a window. A decode step without drafts can promise this.
        drafts: of every request. A node of depth `d` reads the `L` tokens that are sure where a
            decode step of length `L + d + 1` reads them, and its ancestors and itself from the
            ring. So the ring must have `recent + n - 1` rows, and the window `n`.

    Returns:
        `[B, Hq, Dv]` or `[B * n, Hq, Dv]` in the dtype of the query, or `out`.
    """
    rows = []
    for index in range(query.shape[0]):
        if drafts is None:
            keys, values = cached_rows(cache, batch, index, query.dtype)
        else:
            keys, values = _rows_of_node(cache, batch, drafts, index, query.dtype)
        one, sums = attend(query[index : index + 1], keys, values, sm_scale, logit_cap)
        rows.append(one if sink_logits is None else with_sink(one, sums, sink_logits[index]))
    result = apply_o_partner(
        torch.cat(rows) if rows else query.new_zeros(0, query.shape[1], cache.v_spec.head_dim),
        o_partner,
    )
    return result if out is None else out.copy_(result)


def _rows_of_node(
    cache: LayerCache, batch: BatchView, drafts: Drafts, index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V that draft `index` of a batch reads: of sure tokens, then of its ancestors and
    itself."""
    request, node = divmod(index, drafts.count)
    if batch.kv_indptr[request + 1] == batch.kv_indptr[request]:
        return cached_rows(cache, batch, request, dtype)
    bits = (2 << node) - 1 if drafts.mask is None else int(drafts.mask[index])
    nodes = torch.tensor([i for i in range(drafts.count) if bits >> i & 1], dtype=torch.int64)
    keys, values = cached_rows(cache, batch, request, dtype, drafts=drafts.count, seen=len(nodes))
    row = int(batch.rows[request])
    at = (len(keys) + nodes.to(keys.device)) % cache.ring_rows
    return (
        torch.cat([keys, cache.ring_k[row, at].to(dtype)]),
        torch.cat([values, cache.ring_v[row, at].to(dtype)]),
    )


def extend_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    batch: BatchView,
    *,
    qo_indptr: Tensor,
    sm_scale: float,
    logit_cap: float = 0.0,
    o_partner: Tensor | None = None,
    workspace: object = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New tokens over their request's cached prefix, then causally over themselves, unquantized.

    Args:
        query, key, value: `[T, Hq, Dk]`, `[T, H, Dk]`, `[T, H, Dv]`, transformed.
        cache, batch: the prefix only; its windows are those of the prefix.
        qo_indptr: `[B + 1]`; request `b` brings the tokens
            `qo_indptr[b] .. qo_indptr[b + 1] - 1`.
        out, lse: `[T, Hq, Dv]` and float32 `[T, Hq]`, written if given.

    Returns:
        Outputs `[T, Hq, Dv]` in the dtype of the query, and the natural logarithm of the sum of
        exponentiated logits `[T, Hq]`. Tokens from `qo_indptr[B]` on get zeros and -inf.
    """
    result = query.new_zeros(*query.shape[:2], cache.v_spec.head_dim)
    sums = torch.full(query.shape[:2], -torch.inf, dtype=query.dtype, device=query.device)
    for request, (first, last) in enumerate(
        zip(qo_indptr[:-1].tolist(), qo_indptr[1:].tolist(), strict=True)
    ):
        keys, values = cached_rows(cache, batch, request, query.dtype)
        new = slice(first, last)
        keys, values = (
            torch.cat([keys, key[new].to(query.dtype)]),
            torch.cat([values, value[new].to(query.dtype)]),
        )
        result[new], sums[new] = attend(query[new], keys, values, sm_scale, logit_cap)
    result = apply_o_partner(result, o_partner)
    return (result if out is None else out.copy_(result)), (
        sums if lse is None else lse.copy_(sums)
    )


def attend(
    query: Tensor, keys: Tensor, values: Tensor, sm_scale: float, logit_cap: float
) -> tuple[Tensor, Tensor]:
    """Dense attention of the last `M` positions: `[M, Hq, Dk]` over `[n, H, Dk]`, `[n, H, Dv]`;
    output and lse."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("mhgd,nhd->mhgn", grouped, keys) * sm_scale
    if logit_cap:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    hidden = torch.ones(query.shape[0], keys.shape[0], dtype=torch.bool, device=query.device)
    hidden = hidden.triu(keys.shape[0] - query.shape[0] + 1)
    logits = logits.masked_fill(hidden[:, None, None], -torch.inf)
    outputs = torch.einsum("mhgn,nhd->mhgd", torch.softmax(logits, -1), values)
    return outputs.flatten(1, 2), torch.logsumexp(logits, -1).flatten(1, 2)


def with_sink(outputs: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Outputs of a softmax that has one more logit, without a value.

    Args:
        outputs: `[T, Hq, Dv]` of the softmax without it. Not modified.
        lse: `[T, Hq]`, the natural logarithm of its sum of exponentiated logits.
        sink_logits: `[Hq]` or `[T, Hq]`.

    Returns:
        `[T, Hq, Dv]` in the dtype of `outputs`.
    """
    share = torch.sigmoid(lse - sink_logits)
    return (outputs * share[..., None]).to(outputs.dtype)


def apply_o_partner(outputs: Tensor, o_partner: Tensor | None) -> Tensor:
    """Bring attention outputs back to the basis of the model: `o = o' @ o_partner^T`.

    Args:
        outputs: `[T, Hq, Dv]`, any float dtype. Not modified.
        o_partner: `[1 | H, Dv, Dv]`, cast to the dtype of `outputs`; `None` returns `outputs`.

    Returns:
        `[T, Hq, Dv]` in the dtype of `outputs`.
    """
    if o_partner is None:
        return outputs
    heads = outputs.unflatten(1, (o_partner.shape[0], -1))
    return torch.einsum("mhgd,hjd->mhgj", heads, o_partner.to(outputs.dtype)).flatten(1, 2)
