"""Split-KV attention over latents (MLA), stage 1: partial outputs and their lse per split. All
query heads share one row, whose latent is key and value at once.

Codes meet the tensor cores as they lie in memory, in the pieces of `codes_kernel`. Here query heads
are on the long side of the products and tokens on the short one, so that 16 heads fill a tile, and
the lanes of a row are used twice: for the logits `S = q C^T`, and turned around for the sums
`O = P C`. The rotary key beside the codes, in 16 bits, goes into the logits alone.
"""
# ruff: noqa: RUF005 - Triton has no starred tuples.
# mypy: ignore-errors

import triton
import triton.language as tl

from oscar_kernels.decode_attention.codes_kernel import (
    LOG2E,
    _affine,
    _log2_bound,
    _logits,
    _piece,
    _powers,
    _words,
    field,
)
from oscar_kernels.decode_attention.kernel import _positions, _share

HEADROOM = tl.constexpr(10.0)
SLACK = tl.constexpr(5.0)
"""Weights are below 2^15.1, as in `codes_kernel`. The sums are scaled anew only where a logit is
more than `SLACK` above the highest so far, in base 2; those below 2^-24 of the top lose bits."""


@triton.jit(
    do_not_specialize=["heads", "splits", "exact_splits"],
    do_not_specialize_on_alignment=["indptr_ptr", "rows_ptr"],
)
def _latent_stage1_kernel(
    query_ptr, codes_ptr, rotary_ptr, affine_ptr, slots_ptr, indptr_ptr, rows_ptr, block_ptr,
    from_ptr, start_ptr, sink_c_ptr, sink_r_ptr, ring_c_ptr, ring_r_ptr, out_ptr, lse_ptr,
    stride_query_token, stride_query_head, sm_scale, cap, heads, splits, exact_splits,
    D: tl.constexpr, ROPE: tl.constexpr, GROUPS: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, RING: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, EXACT_BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr,
    BF16: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: `M` query heads of one request, and one split of its codes or of its windows.
    Splits without tokens store an lse of -inf."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(2)
    split = tl.program_id(1)
    head = tl.program_id(0) * M + tl.arange(0, M)
    seen = head < heads
    query = query_ptr + b.to(tl.int64) * stride_query_token + head * stride_query_head
    where = (b.to(tl.int64) * heads + head) * (exact_splits + splits) + split
    first = tl.load(indptr_ptr + b).to(tl.int64)
    n = (tl.load(indptr_ptr + b + 1) - first).to(tl.int32)
    row = tl.load(rows_ptr + b).to(tl.int64)
    sink_from, a, s, r = _positions(n, n, row, from_ptr, start_ptr, SINK, RECENT)
    lse = tl.full([M], float("-inf"), tl.float32)
    if split >= exact_splits:
        lo, hi = _share(a + r - s, split - exact_splits, splits, BLOCK_N)
        if lo < hi:
            pieces, lse = _attend_latents(
                query, seen, codes_ptr, rotary_ptr, affine_ptr, slots_ptr + first, lo, hi, a, s - a,
                sm_scale, cap, D, ROPE, GROUPS, M, BLOCK_N, STAGES, HALF, BF16, CAPPED,
            )  # fmt: skip
            lane = tl.arange(0, D // 8)
            for R in tl.static_range(8):
                channel = 2 * lane + R // 4 + (R % 4) * (D // 4)
                to = out_ptr + where[:, None] * D + channel[None, :]
                tl.store(to, pieces[R], mask=seen[:, None])
    else:
        lo, hi = _share(s - a + n - r, split, exact_splits, EXACT_BLOCK_N)
        if lo < hi:
            block = tl.load(block_ptr + row).to(tl.int64) * SINK
            sinks = (sink_c_ptr + block * D, sink_r_ptr + block * ROPE)
            rings = (ring_c_ptr + row * RING * D, ring_r_ptr + row * RING * ROPE)
            quarters, lse = _attend_windows(
                query, seen, sinks, rings, lo, hi, sm_scale, cap, sink_from, a, s, r, D, ROPE, M,
                EXACT_BLOCK_N, CAPPED, RING,
            )  # fmt: skip
            channel = tl.arange(0, D // 4)
            for i in tl.static_range(4):
                to = out_ptr + where[None, :] * D + (i * (D // 4) + channel)[:, None]
                tl.store(to, quarters[i], mask=seen[None, :])
    tl.store(lse_ptr + where, lse, mask=seen)


@triton.jit
def _attend_latents(
    query_ptr, seen, codes_ptr, rotary_ptr, affine_ptr, slots_ptr, lo, hi, a, hole, sm_scale, cap,
    D: tl.constexpr, ROPE: tl.constexpr, GROUPS: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr, BF16: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Rows `lo .. hi - 1` of a request that are codes, counted without the `hole` of exact ones at
    position `a`; arguments as of `codes_kernel._attend_codes`.

    Returns:
        Eight pieces `[M, lanes]` of the output and its base-2 lse `[M]`.
    """
    W: tl.constexpr = D // 8
    RECORD: tl.constexpr = W + ROPE
    UNIT: tl.constexpr = 16777216.0 if HALF else 1.0
    DTYPE: tl.constexpr = tl.float16 if HALF else tl.float32
    ROTARY: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    w = tl.arange(0, W)
    j = tl.arange(0, ROPE)

    raw = ()
    largest = tl.zeros([M], tl.float32)
    for R in tl.static_range(4):
        even, odd = _pairs(query_ptr[:, None] + (R * 2 * W + 2 * w)[None, :], seen[:, None])
        raw = raw + (even, odd)
        largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1))
    up, down = _powers(largest, HALF)
    q = ()
    sums = ()
    for R in tl.static_range(8):
        q = q + ((raw[R % 4 * 2 + R // 4] * up[:, None] * (1 / field(R, 2))).to(DTYPE),)
    for g in tl.static_range(GROUPS):
        whole = tl.zeros([M], tl.float32)
        for R in tl.static_range(4):
            if g == R * GROUPS // 4:
                whole += tl.sum(raw[2 * R] + raw[2 * R + 1], 1)
        sums = sums + (whole / (down * UNIT),)
    rotary = tl.load(query_ptr[:, None] + (D + j)[None, :], mask=seen[:, None], other=0.0)
    rotary = (rotary.to(tl.float32) / (down * UNIT)[:, None]).to(ROTARY)  # by a power of two
    factor = down * (UNIT * sm_scale * LOG2E)

    acc = ()
    shift = ()
    for _ in tl.static_range(8):
        acc = acc + (tl.zeros([M, W], tl.float32),)
    for _ in tl.static_range(GROUPS):
        shift = shift + (tl.zeros([M, BLOCK_N], tl.float32),)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M, BLOCK_N], tl.float32)  # rows are added up at the end, as of `shift`
    token = tl.arange(0, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        at = tl.minimum(start + token, hi - 1)
        slot = tl.load(slots_ptr + tl.where(at < a, at, at + hole)).to(tl.int64)
        lanes = codes_ptr + slot * RECORD
        keys = rotary_ptr + slot * RECORD + W
        c = tl.load(lanes[None, :] + w[:, None])  # [W, BLOCK_N]
        turned = tl.load(lanes[:, None] + w[None, :])  # the same, [BLOCK_N, W]
        rope = tl.load(keys[None, :] + j[:, None]).to(ROTARY)
        words = _words(affine_ptr, slot, GROUPS)
        if GROUPS == 4:
            words = _words(affine_ptr, 2 * slot, 2) + _words(affine_ptr, 2 * slot + 1, 2)

        x = tl.dot(rotary, rope, input_precision="ieee")
        scales = ()
        offsets = ()
        for g in tl.static_range(GROUPS):
            product = tl.zeros([M, BLOCK_N], tl.float32)
            for R in tl.static_range(8):
                if g == (R % 4) * GROUPS // 4:
                    piece = _piece(c, c, R, 2, HALF)
                    product = tl.dot(q[R], piece, product, input_precision="ieee")
            scale, offset = _affine(words[g], BF16)
            x += product * scale[None, :] + sums[g][:, None] * offset[None, :]
            scales = scales + (scale,)
            offsets = offsets + (offset,)
        x = _base_2(x, factor, cap, CAPPED)
        x += tl.where(start + token < hi, 0.0, float("-inf"))[None, :]

        largest_scale = scales[0]
        for g in tl.static_range(1, GROUPS):
            largest_scale = tl.maximum(largest_scale, scales[g])
        highest = tl.max(x + _log2_bound(largest_scale)[None, :], 1)
        if tl.max(highest - top, 0) > SLACK:  # seldom, behind the first rows
            higher = tl.maximum(top, highest)
            fade = tl.exp2(top - higher)[:, None]
            top = higher
            total *= fade
            faded = ()
            for g in tl.static_range(GROUPS):
                faded = faded + (shift[g] * fade,)
            shift = faded
            faded = ()
            for R in tl.static_range(8):
                faded = faded + (acc[R] * fade,)
            acc = faded
        p = tl.exp2(x - (top - HEADROOM)[:, None])
        total += p
        shifted = ()
        for g in tl.static_range(GROUPS):
            shifted = shifted + (shift[g] + p * offsets[g][None, :],)
        shift = shifted
        pieces = ()
        for R in tl.static_range(8):
            weights = (p * scales[(R % 4) * GROUPS // 4][None, :]).to(DTYPE)
            piece = _piece(turned, turned, R, 2, HALF)
            pieces = pieces + (tl.dot(weights, piece, acc[R], input_precision="ieee"),)
        acc = pieces

    out = ()
    sure = tl.sum(total, 1)
    for R in tl.static_range(8):
        moved = tl.sum(shift[(R % 4) * GROUPS // 4], 1)
        out = out + ((acc[R] * (UNIT / field(R, 2)) + moved[:, None]) / sure[:, None],)
    return out, top - HEADROOM + tl.log2(sure)


@triton.jit
def _pairs(pointers, mask):
    """Numbers at even places and those behind them, float32."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if dtype == tl.bfloat16:
        both = tl.load(pointers.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
        even = (both << 16).to(tl.float32, bitcast=True)
        odd = (both & -65536).to(tl.float32, bitcast=True)
    else:
        even = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        odd = tl.load(pointers + 1, mask=mask, other=0.0).to(tl.float32)
    return even, odd


@triton.jit
def _base_2(x, factor, cap, CAPPED: tl.constexpr):
    """As `_logits`, with a factor for each row."""
    return tl.trans(_logits(tl.trans(x), factor, cap, CAPPED)) if CAPPED else x * factor[:, None]


@triton.jit
def _attend_windows(
    query_ptr, seen, sinks, rings, lo, hi, sm_scale, cap, sink_from, a, s, r,
    D: tl.constexpr, ROPE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Exact rows `lo .. hi - 1`, those of the sinks first.

    Args:
        sinks, rings: pointers to the first latent and the first rotary key of the request.

    Returns:
        Four quarters `[channels, M]` of the output and its base-2 lse `[M]`.
    """
    Q: tl.constexpr = D // 4
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    channel = tl.arange(0, Q)
    j = tl.arange(0, ROPE)
    q = ()
    acc = ()
    for i in tl.static_range(4):
        of_query = query_ptr[None, :] + (i * Q + channel)[:, None]
        q = q + (tl.load(of_query, mask=seen[None, :], other=0.0),)
        acc = acc + (tl.zeros([Q, M], tl.float32),)
    rotary = tl.load(query_ptr[None, :] + (D + j)[:, None], mask=seen[None, :], other=0.0)
    factor = tl.full([M], LOG2E, tl.float32) * sm_scale
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    token = tl.arange(0, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=1):
        at = tl.minimum(start + token, hi - 1)
        position = tl.where(at < s - a, a + at, r - (s - a) + at)
        in_sink = (position >= sink_from) & (position < s)
        place = tl.where(in_sink, position, position % RING).to(tl.int64)
        latents = tl.where(in_sink, sinks[0], rings[0]) + place * D
        keys = tl.where(in_sink, sinks[1], rings[1]) + place * ROPE
        rope = tl.load(keys[:, None] + j[None, :]).to(DTYPE)
        x = tl.dot(rope, rotary, input_precision="ieee")
        c = ()
        for i in tl.static_range(4):
            part = tl.load(latents[:, None] + (i * Q + channel)[None, :]).to(DTYPE)
            c = c + (part,)
            x = tl.dot(part, q[i], x, input_precision="ieee")
        hidden = tl.where(start + token < hi, 0.0, float("-inf"))
        x = _logits(x, factor, cap, CAPPED) + hidden[:, None]
        higher = tl.maximum(top, tl.max(x, 0))
        fade = tl.exp2(top - higher)
        p = tl.exp2(x - higher[None, :]).to(DTYPE)
        total = total * fade + tl.sum(p.to(tl.float32), 0)
        quarters = ()
        for i in tl.static_range(4):
            held = acc[i] * fade[None, :]
            quarters = quarters + (tl.dot(tl.trans(c[i]), p, held, input_precision="ieee"),)
        acc = quarters
        top = higher
    out = ()
    for i in tl.static_range(4):
        out = out + (acc[i] / total[None, :],)
    return out, top + tl.log2(total)
