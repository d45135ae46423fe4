"""Split-KV attention over an INT2 cache. Stage 1: partial outputs and their lse per split. Stage 2:
merge the splits of every query row, then bring outputs back by the value partner.

Tokens are kept on the long side of the tensor cores and query rows (heads of one KV head, times new
tokens) on the short one: `S^T = K q^T`, `O^T = V^T P^T`. A program has one kind of tokens: INT2, of
the windows, or (extend) new.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from oscar_kernels.decode_attention.codes_kernel import LOG2E, _attend_codes, _logits, padded

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=["requests", "splits", "exact_splits"],
    do_not_specialize_on_alignment=["indptr_ptr", "rows_ptr", "cuts_ptr", "mask_ptr"],
)
def _attention_stage1_kernel(
    query_ptr, codes_ptr, affine_ptr, slots_ptr, indptr_ptr, rows_ptr, block_ptr, from_ptr,
    start_ptr, sink_k_ptr, sink_v_ptr, ring_k_ptr, ring_v_ptr, key_ptr, value_ptr, cuts_ptr,
    mask_ptr, out_ptr, lse_ptr, stride_query_token, stride_query_head, stride_key_token,
    stride_key_head, stride_value_token, stride_value_head, sm_scale, cap, requests, splits,
    exact_splits,
    H: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GK: tl.constexpr,
    GV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    RING: tl.constexpr, REQUESTS: tl.constexpr, TOKENS: tl.constexpr, DRAFTS: tl.constexpr,
    TREE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT_BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, HALF: tl.constexpr, BF16: tl.constexpr, CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one KV head, `TOKENS` query tokens of one request (0: one, and the request is
    the program's), one split of INT2 tokens, of window tokens or (extend) all new ones. Splits
    without tokens store an lse of -inf.

    With `DRAFTS` the query token is a draft, one of so many of its request. Its ancestors and
    itself are the last of its tokens then, wherever they lie in the ring.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    h = tl.program_id(0)
    split = tl.program_id(1)
    EXTEND: tl.constexpr = TOKENS > 0
    NEW_SPLITS: tl.constexpr = 1 if EXTEND else 0
    line = tl.arange(0, M)
    token = line // G
    if EXTEND:
        b, chunk = _request_of_block(tl.program_id(2), cuts_ptr, requests, REQUESTS, TOKENS)
        there = b < requests
        b = tl.minimum(b, requests - 1)
        first_new = tl.load(cuts_ptr + b).to(tl.int64)
        new = (tl.load(cuts_ptr + b + 1) - first_new).to(tl.int32)
        newest = chunk * TOKENS + token
        seen = there & (token < TOKENS) & (newest < new)
        query_token = first_new + newest
    else:
        b = tl.program_id(2) // max(DRAFTS, 1)
        newest = token
        seen = token < 1
        query_token = tl.program_id(2) + token.to(tl.int64)
        first_new = b
        new = 0
    head = h * G + line % G
    query = query_ptr + query_token * stride_query_token + head * stride_query_head
    where = (query_token * (H * G) + head) * (NEW_SPLITS + exact_splits + splits) + split

    first = tl.load(indptr_ptr + b).to(tl.int64)
    n = (tl.load(indptr_ptr + b + 1) - first).to(tl.int32)
    row = tl.load(rows_ptr + b).to(tl.int64)
    sure = n
    nodes = 0
    if DRAFTS > 0:
        nodes = (2 << (tl.program_id(2) % DRAFTS)) - 1
        if TREE:
            nodes = tl.load(mask_ptr + tl.program_id(2))
        sure = tl.maximum(n - DRAFTS, 0)
        n = tl.where(n > 0, sure + tl.sum(_bits(nodes), 0), 0)
    sink_from, a, s, r = _positions(n, sure, row, from_ptr, start_ptr, SINK, RECENT)

    empty = tl.full([M], float("-inf"), tl.float32)
    if split >= NEW_SPLITS + exact_splits:
        lo, hi = _share(a + r - s, split - NEW_SPLITS - exact_splits, splits, BLOCK_N)
        if lo < hi:
            pieces, lse = _attend_codes(
                query, seen, codes_ptr, affine_ptr, slots_ptr + first, h, lo, hi, a, s - a,
                sm_scale, cap, H, DK, DV, GK, GV, BK, BV, M, BLOCK_N, STAGES, HALF, BF16, CAPPED,
            )  # fmt: skip
            lane = tl.arange(0, padded(DV // 8))
            for R in tl.static_range(8):
                channel = 2 * lane + R // 4 + (R % 4) * (DV // 4)
                _store(out_ptr, where, channel, lane < DV // 8, pieces[R], seen, DV)
            tl.store(lse_ptr + where, lse, mask=seen)
        else:
            tl.store(lse_ptr + where, empty, mask=seen)
    else:
        channel = tl.arange(0, padded(DV))
        window = (sink_from, a, s, r, sure, nodes)
        if split >= NEW_SPLITS:
            lo, hi = _share(s - a + n - r, split - NEW_SPLITS, exact_splits, EXACT_BLOCK_N)
            if lo < hi:
                block = tl.load(block_ptr + row).to(tl.int64) * SINK * H + h
                ring = row * RING * H + h
                exact_k = (sink_k_ptr + block * DK, ring_k_ptr + ring * DK, H * DK)
                exact_v = (sink_v_ptr + block * DV, ring_v_ptr + ring * DV, H * DV)
                acc, lse = _attend_rows(
                    query, seen, newest, exact_k, exact_v, lo, hi, sm_scale, cap, DK, DV, M,
                    EXACT_BLOCK_N, CAPPED, window, RING, False, TREE,
                )  # fmt: skip
                _store(out_ptr, where, channel, channel < DV, acc, seen, DV)
                tl.store(lse_ptr + where, lse, mask=seen)
            else:
                tl.store(lse_ptr + where, empty, mask=seen)
        elif EXTEND:
            hi = tl.minimum(new, (chunk + 1) * TOKENS)
            if there & (hi > 0):
                key = key_ptr + first_new * stride_key_token + h * stride_key_head
                value = value_ptr + first_new * stride_value_token + h * stride_value_head
                acc, lse = _attend_rows(
                    query, seen, newest, (key, key, stride_key_token),
                    (value, value, stride_value_token), 0, hi, sm_scale, cap, DK, DV, M,
                    EXACT_BLOCK_N, CAPPED, window, 1, True, False,
                )  # fmt: skip
                _store(out_ptr, where, channel, channel < DV, acc, seen, DV)
                tl.store(lse_ptr + where, lse, mask=seen)


@triton.jit
def _attend_rows(
    query_ptr, seen, newest, exact_k, exact_v, lo, hi, sm_scale, cap,
    DK: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, window, RING: tl.constexpr, NEW: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Exact tokens `lo .. hi - 1`: of the windows, or the new ones up to `newest` for each row.

    Args:
        exact_k, exact_v: pointer and stride of a token, `(sink, ring, stride)`, at the request's
            first row and the program's head; for new tokens `(pointer, pointer, stride)`.
        window: `_positions`, number of sure tokens, mask of the nodes that are seen behind them.

    Returns:
        The output `[channels, M]` and its base-2 lse `[M]`.
    """
    CK: tl.constexpr = padded(DK)
    CV: tl.constexpr = padded(DV)
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    sink_from, a, s, r, sure, nodes = window
    ck = tl.arange(0, CK)
    cv = tl.arange(0, CV)
    q = tl.load(
        query_ptr[None, :] + ck[:, None], mask=(ck < DK)[:, None] & seen[None, :], other=0.0
    ).to(DTYPE)
    factor = tl.full([M], LOG2E, tl.float32) * sm_scale
    acc = tl.zeros([CV, M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    token = tl.arange(0, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=2):
        at = tl.minimum(start + token, hi - 1)
        if NEW:
            keys = exact_k[0] + at.to(tl.int64) * exact_k[2]
            values = exact_v[0] + at.to(tl.int64) * exact_v[2]
            hidden = tl.where(
                ((start + token) < hi)[:, None] & (at[:, None] <= newest[None, :]),
                0.0,
                float("-inf"),
            )
        else:
            position = tl.where(at < s - a, a + at, r - (s - a) + at)
            in_sink = (position >= sink_from) & (position < s)
            in_ring = position
            if TREE:
                node = _place_of_bit(nodes, position - sure)
                in_ring = tl.where(position < sure, position, sure + node)
            place = tl.where(in_sink, position, in_ring % RING).to(tl.int64)
            keys = tl.where(in_sink, exact_k[0], exact_k[1]) + place * exact_k[2]
            values = tl.where(in_sink, exact_v[0], exact_v[1]) + place * exact_v[2]
            hidden = tl.where(start + token < hi, 0.0, float("-inf"))[:, None]
        k = tl.load(keys[:, None] + ck[None, :], mask=(ck < DK)[None, :], other=0.0).to(DTYPE)
        v = tl.load(values[None, :] + cv[:, None], mask=(cv < DV)[:, None], other=0.0).to(DTYPE)
        x = _logits(tl.dot(k, q, input_precision="ieee"), factor, cap, CAPPED) + hidden
        higher = tl.maximum(top, tl.max(x, 0))
        fade = tl.exp2(top - higher)
        p = tl.exp2(x - higher[None, :]).to(
            DTYPE
        )  # rounded before it is summed: the weights then add up to one
        total = total * fade + tl.sum(p.to(tl.float32), 0)
        acc = tl.dot(v, p, acc * fade[None, :], input_precision="ieee")
        top = higher
    return acc / total[None, :], top + tl.log2(total)


@triton.jit
def _bits(mask):
    """The bits of an integer `[32]`, the lowest one first."""
    return (mask >> tl.arange(0, 32)) & 1


@triton.jit
def _place_of_bit(mask, rank):
    """Which bit of `mask` is set as the `rank`-th, from 0; 0 for a rank that none has."""
    bits = _bits(mask)
    at = (bits > 0)[None, :] & ((tl.cumsum(bits, 0) - 1)[None, :] == rank[:, None])
    return tl.sum(tl.where(at, tl.arange(0, 32)[None, :], 0), 1)


@triton.jit
def _positions(n, sure, row, from_ptr, start_ptr, SINK: tl.constexpr, RECENT: tl.constexpr):
    """`sink_from, a, s, r` of a row with `n` tokens, of which the first `sure` are no drafts.

    Exact positions are `[a, s)` and `[r, n)`, from the sink where `sink_from <= p < s`; INT2 are
    `[0, a)` and `[s, r)`.
    """
    s = tl.minimum(sure, SINK)
    sink_from = tl.minimum(tl.load(from_ptr + row).to(tl.int32), s)
    r = tl.minimum(tl.maximum(n - RECENT, tl.load(start_ptr + row).to(tl.int32)), sure)
    return sink_from, tl.minimum(sink_from, r), s, tl.maximum(r, s)


@triton.jit
def _share(count, split, splits, BLOCK_N: tl.constexpr):
    """A split's part of `count` tokens: equal parts, of whole tiles."""
    part = tl.cdiv(tl.cdiv(count, splits), BLOCK_N) * BLOCK_N
    lo = split * part
    return lo, tl.minimum(lo + part, count)


@triton.jit
def _store(out_ptr, where, channel, inside, acc, seen, DV: tl.constexpr):
    """Partial output `[channels, M]` of the lines `where`."""
    tl.store(
        out_ptr + where[None, :] * DV + channel[:, None], acc, mask=seen[None, :] & inside[:, None]
    )


@triton.jit
def _request_of_block(z, cuts_ptr, requests, REQUESTS: tl.constexpr, TOKENS: tl.constexpr):
    """Extend: the request and the block of new tokens of program `z`; a request past the last one
    has none."""
    i = tl.arange(0, REQUESTS)
    first = tl.load(cuts_ptr + i, mask=i < requests, other=0).to(tl.int32)
    last = tl.load(cuts_ptr + i + 1, mask=i < requests, other=0).to(tl.int32)
    ends = tl.cumsum((last - first + TOKENS - 1) // TOKENS, 0)
    b = tl.sum((ends <= z).to(tl.int32), 0)
    return b, z - tl.max(tl.where(ends <= z, ends, 0), 0)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tokens_ptr"])
def _merge_stage2_kernel(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, tokens_ptr, sink_ptr, stride_out_token,
    stride_out_head, stride_sink_token, stride_sink_head, heads, splits,
    DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, EXTEND: tl.constexpr,
    SINK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some channels of one query token and head. Splits whose lse is -inf are not
    read, and (extend) tokens from `tokens_ptr` on not written. With SINK one more logit takes its
    share.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = (token * heads + head) * splits
    i = tl.arange(0, BLOCK_S)
    top = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for start in tl.range(0, splits, BLOCK_S):
        lse = tl.load(
            partial_lse_ptr + first + start + i, mask=start + i < splits, other=float("-inf")
        )
        top = tl.maximum(top, lse)
    highest = tl.max(top, 0)
    if SINK:
        logit = tl.load(sink_ptr + token * stride_sink_token + head * stride_sink_head)
        sink = logit.to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    for start in tl.range(0, splits, BLOCK_S):
        lse = tl.load(
            partial_lse_ptr + first + start + i, mask=start + i < splits, other=float("-inf")
        )
        weight = tl.exp2(lse - reference)
        part = tl.load(
            partial_ptr + (first + start + i)[:, None] * DV + channel[None, :],
            mask=(lse > float("-inf"))[:, None] & (channel < DV)[None, :],
            other=0.0,
        )
        acc += tl.sum(part * weight[:, None], 0)
        total += tl.sum(weight, 0)
    if SINK:
        total += tl.exp2(sink - reference)
    result = acc / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + token * stride_out_token + head * stride_out_head + channel
    inside = channel < DV
    if EXTEND:
        seen = token < tl.load(tokens_ptr)
        inside &= seen
        tl.store(
            lse_ptr + token * heads + head,
            (reference + tl.log2(total)) * LN2,
            mask=seen & (tl.program_id(0) == 0),
        )
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["tokens_ptr"])
def _undo_stage2_kernel(
    merged_ptr, partner_ptr, out_ptr, tokens_ptr, stride_partner, stride_out_token, stride_out_head,
    tokens,
    H: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, EXTEND: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`o = o' @ o_partner^T` for a block of tokens times heads of one KV head and a block of output
    channels."""
    h = tl.program_id(1)
    line = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = line // G
    head = h * G + line % G
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    d = tl.arange(0, BLOCK_D)
    seen = token < tokens
    if EXTEND:
        seen &= token < tl.load(tokens_ptr)
    partner = partner_ptr + h * stride_partner + j[None, :] * DV + d[:, None]
    p = tl.load(partner, mask=(d < DV)[:, None] & (j < DV)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    merged = merged_ptr + (token * (H * G) + head)[:, None] * DV + d[None, :]
    o = tl.load(merged, mask=seen[:, None] & (d < DV)[None, :], other=0.0)
    result = tl.dot(o, p, input_precision=PRECISION).to(out_ptr.dtype.element_ty)
    out = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + j[None, :]
    tl.store(out, result, mask=seen[:, None] & (j < DV)[None, :])
