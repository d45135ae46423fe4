"""Attention over INT2 tokens, one program's part of stage 1: codes meet the tensor cores as they
lie in memory.

Tokens are kept on the long side of the tensor cores and query rows (heads of one KV head, times new
tokens) on the short one: `S^T = K q^T`, `O^T = V^T P^T`. A program with INT2 tokens never
multiplies by scales inside a product.

Codes are read as 16-bit lanes. Lane `w` of a row with `8 * W` channels holds bytes `2w` and
`2w + 1`, so *piece* `R` of 0..7, bits `2R` and `2R + 1` of all lanes, is channels
`2w + R // 4 + (R % 4) * 2W`. A 2-bit field kept in place in the lower byte of a lane *is* a float16
number, the subnormal `code * 4^(R % 4) * 2^-24`, which the tensor cores multiply exactly: unpacking
is one AND. The query's pieces carry `4^-(R % 4)`, the outputs are multiplied by it at the end, and
`2^24` goes into scalars. Under the interpreter everything is float32 and the unit is 1.

Codes of 4 bits lie in twice as many lanes: the first `W` hold the quarters 0 and 1, the others the
quarters 2 and 3. Piece `R` is the same channels as above, a 4-bit field times `16^(R % 2)`.
"""
# ruff: noqa: RUF005 - Triton has no starred tuples.
# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
HEADROOM = tl.constexpr(15.0)
"""Weights of INT2 values are below 2^15.1, which float16 holds; only those below 2^-29 of the top
lose bits."""


@triton.constexpr_function
def padded(width):
    """The power of two, 16 or more, that holds `width`. `triton.next_power_of_2` is replaced by
    SGLang, and by one that kernels cannot call."""
    return max(16, 1 << (width - 1).bit_length())


@triton.constexpr_function
def field(r, bits):
    """What the codes of piece `r` are multiplied by where they lie."""
    return 2.0 ** (bits * (r % 4 % (8 // bits)))


@triton.jit
def _attend_codes(
    query_ptr, seen, codes_ptr, affine_ptr, slots_ptr, h, lo, hi, a, hole, sm_scale, cap,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HALF: tl.constexpr, BF16: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """INT2 tokens `lo .. hi - 1` of a request, counted without the `hole` of exact ones at position
    `a`.

    Args:
        query_ptr: `[M]` pointers to rows.
        slots_ptr: of the request's first token.

    Returns:
        Eight pieces `[lanes, M]` of the output and its base-2 lse `[M]`.
    """
    WK: tl.constexpr = DK // 8
    WV: tl.constexpr = DV // 8
    LK: tl.constexpr = padded(WK)
    LV: tl.constexpr = padded(WV)
    RECORD_K: tl.constexpr = WK * BK // 2
    RECORD_V: tl.constexpr = WV * BV // 2
    UNIT: tl.constexpr = 16777216.0 if HALF else 1.0
    DTYPE: tl.constexpr = tl.float16 if HALF else tl.float32
    wk = tl.arange(0, LK)
    wv = tl.arange(0, LV)

    raw = ()
    largest = tl.zeros([M], tl.float32)
    for R in tl.static_range(8):
        channel = 2 * wk + R // 4 + (R % 4) * (2 * WK)
        part = tl.load(
            query_ptr[None, :] + channel[:, None],
            mask=(wk < WK)[:, None] & seen[None, :],
            other=0.0,
        )
        raw = raw + (part.to(tl.float32),)
        largest = tl.maximum(largest, tl.max(tl.abs(raw[R]), 0))
    up, down = _powers(largest, HALF)
    q = ()
    for R in tl.static_range(8):
        q = q + ((raw[R] * up[None, :] * (1 / field(R, BK))).to(DTYPE),)
    sums = ()
    for g in tl.static_range(GK):
        whole = tl.zeros([M], tl.float32)
        for R in tl.static_range(8):
            if g == (R % 4) * GK // 4:
                whole += tl.sum(raw[R], 0)
        sums = sums + (whole / (down * UNIT),)
    factor = down * (UNIT * sm_scale * LOG2E)

    acc = ()
    shift = ()
    for _ in tl.static_range(8):
        acc = acc + (tl.zeros([LV, M], tl.float32),)
    for _ in tl.static_range(GV):
        shift = shift + (tl.zeros([M], tl.float32),)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    token = tl.arange(0, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        at = tl.minimum(start + token, hi - 1)
        position = tl.where(at < a, at, at + hole)
        row = tl.load(slots_ptr + position).to(tl.int64) * H + h
        lanes = codes_ptr + row * (RECORD_K + RECORD_V)
        kx = _lanes(lanes[:, None] + wk[None, :], (wk < WK)[None, :], LK == WK)  # [BLOCK_N, LK]
        ky = kx
        if BK == 4:
            ky = _lanes(lanes[:, None] + (WK + wk)[None, :], (wk < WK)[None, :], LK == WK)
        to_v = lanes[None, :] + (RECORD_K + wv)[:, None]
        vx = _lanes(to_v, (wv < WV)[:, None], LV == WV)  # [LV, BLOCK_N]
        vy = vx
        if BV == 4:
            vy = _lanes(to_v + WV, (wv < WV)[:, None], LV == WV)
        words = _words(affine_ptr, row, GK + GV)

        x = tl.zeros([BLOCK_N, M], tl.float32)
        for g in tl.static_range(GK):
            product = tl.zeros([BLOCK_N, M], tl.float32)
            for R in tl.static_range(8):
                if g == (R % 4) * GK // 4:
                    piece = _piece(kx, ky, R, BK, HALF)
                    product = tl.dot(piece, q[R], product, input_precision="ieee")
            scale, offset = _affine(words[g], BF16)
            if g == 0:
                x = product * scale[:, None] + sums[g][None, :] * offset[:, None]
            else:
                x += product * scale[:, None] + sums[g][None, :] * offset[:, None]
        hidden = tl.where(start + token < hi, 0.0, float("-inf"))
        x = _logits(x, factor, cap, CAPPED) + hidden[:, None]

        scales = ()
        offsets = ()
        for g in tl.static_range(GV):
            scale, offset = _affine(words[GK + g], BF16)
            scales = scales + (scale,)
            offsets = offsets + (offset,)
        bound = _log2_bound(scales[0])
        for g in tl.static_range(1, GV):
            bound = tl.maximum(bound, _log2_bound(scales[g]))
        higher = tl.maximum(top, tl.max(x + bound[:, None], 0))
        fade = tl.exp2(top - higher)
        p = tl.exp2(x - (higher - HEADROOM)[None, :])
        total = total * fade + tl.sum(p, 0)
        top = higher
        shifted = ()
        for g in tl.static_range(GV):
            shifted = shifted + (shift[g] * fade + tl.sum(p * offsets[g][:, None], 0),)
        shift = shifted
        pieces = ()
        for R in tl.static_range(8):
            weights = (p * scales[(R % 4) * GV // 4][:, None]).to(DTYPE)
            piece = tl.dot(
                _piece(vx, vy, R, BV, HALF), weights, acc[R] * fade[None, :], input_precision="ieee"
            )
            pieces = pieces + (piece,)
        acc = pieces

    out = ()
    for R in tl.static_range(8):
        moved = shift[(R % 4) * GV // 4]
        out = out + ((acc[R] * (UNIT / field(R, BV)) + moved[None, :]) / total[None, :],)
    return out, top - HEADROOM + tl.log2(total)


@triton.jit
def _lanes(pointers, mask, WHOLE: tl.constexpr):
    """16-bit lanes; without a mask where the tile has no padding."""
    if WHOLE:
        lanes = tl.load(pointers)
    else:
        lanes = tl.load(pointers, mask=mask, other=0)
    return lanes


@triton.jit
def _piece(x, y, R: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    """Codes of piece `R` of 16-bit lanes, times `field` and, as float16, times `2^-24`.

    Args:
        x, y: the lanes of a row; `y` the second half of them, with codes of 4 bits.
    """
    if BITS == 4:
        z = x if R % 4 < 2 else y
        if HALF:
            if R == 0 or R == 2:
                z = _keep(z, "and.b32 $0, $1, 0x000F000F;")
            elif R == 1 or R == 3:
                z = _keep(z, "and.b32 $0, $1, 0x00F000F0;")
            elif R == 4 or R == 6:
                z = _keep(z, "{.reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, 0x000F000F;}")
            else:
                z = _keep(z, "{.reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, 0x00F000F0;}")
        else:
            z = ((z >> (8 * (R // 4))) & (15 << (4 * (R % 2)))).to(tl.float32)
        y = z
    elif HALF:
        if R == 0:
            y = _keep(x, "and.b32 $0, $1, 0x00030003;")
        elif R == 1:
            y = _keep(x, "and.b32 $0, $1, 0x000C000C;")
        elif R == 2:
            y = _keep(x, "and.b32 $0, $1, 0x00300030;")
        elif R == 3:
            y = _keep(x, "and.b32 $0, $1, 0x00C000C0;")
        elif R == 4:
            y = _keep(x, "{.reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, 0x00030003;}")
        elif R == 5:
            y = _keep(x, "{.reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, 0x000C000C;}")
        elif R == 6:
            y = _keep(x, "{.reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, 0x00300030;}")
        else:
            y = _keep(x, "{.reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, 0x00C000C0;}")
    else:
        y = ((x >> (8 * (R // 4))) & (3 << (2 * (R % 4)))).to(tl.float32)
    return y


@triton.jit
def _keep(x, ASM: tl.constexpr):
    """Two lanes at a time; the compiler would take them apart."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _words(affine_ptr, row, N: tl.constexpr):
    """The `N` 32-bit words of scale and offset of each token."""
    if N == 2:
        both = tl.load((affine_ptr + row * 2).to(tl.pointer_type(tl.int64)))
        words = (both.to(tl.int32), (both >> 32).to(tl.int32))
    else:
        words = ()
        for i in tl.static_range(N):
            words = words + (tl.load(affine_ptr + row * N + i),)
    return words


@triton.jit
def _affine(word, BF16: tl.constexpr):
    """Scale and offset from one 32-bit word."""
    if BF16:
        scale = (word << 16).to(tl.float32, bitcast=True)
        offset = (word & -65536).to(tl.float32, bitcast=True)
    else:
        scale = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, offset


@triton.jit
def _log2_bound(scale):
    """Within 0.1 of the logarithm, from below: a float's bits read as a number are piecewise linear
    in it."""
    return tl.maximum(
        scale.to(tl.int32, bitcast=True).to(tl.float32) * (1 / 8388608) - 127.0, -24.0
    )


@triton.jit
def _powers(largest, HALF: tl.constexpr):
    """The power of two that brings `largest` to 2^13 .. 2^14, and its inverse; zero and tiny rows
    get a finite one."""
    if HALF:
        exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 14)
        up = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
        down = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    else:
        up = tl.full(largest.shape, 1.0, tl.float32)
        down = up
    return up, down


@triton.jit
def _logits(x, factor, cap, CAPPED: tl.constexpr):
    """Base-2 logits from products; `factor` and `cap` in that base too."""
    x = x * factor[None, :]
    if CAPPED:
        x = cap - 2 * cap / (tl.exp2(x * (2 * LOG2E / cap)) + 1)
    return x
