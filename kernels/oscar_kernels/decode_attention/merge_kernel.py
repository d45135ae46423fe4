"""Stage 2 of split-KV attention: merge the splits of every query row, then bring outputs back by
the value partner."""
# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tokens_ptr"])
def _merge_stage2_kernel(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    tokens_ptr,
    sink_ptr,
    stride_out_token,
    stride_out_head,
    stride_sink_token,
    stride_sink_head,
    heads,
    splits,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXTEND: tl.constexpr,
    SINK: tl.constexpr,
    PDL: tl.constexpr,
):
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
    merged_ptr,
    partner_ptr,
    out_ptr,
    tokens_ptr,
    stride_partner,
    stride_out_token,
    stride_out_head,
    tokens,
    H: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXTEND: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
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
