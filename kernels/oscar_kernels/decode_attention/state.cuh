// Shapes, parameters, what drafts see, and what a warp keeps of its query heads.
#pragma once

#include "machine.cuh"

constexpr int WARPS = HB * VH * TW, THREADS = WARPS * 32;
// A row of codes is BITS / 2 parts, one behind the other (spec.py). Byte j of a part has the codes of channel j of
// 4, or 2, neighbouring quarters of the row. A part has KC or VC pieces of 16 bytes.
constexpr int KC = DK / 64, VC = DV / 64, PARTS_K = BITS_K / 2, PARTS_V = BITS_V / 2;
constexpr int IN_BYTE_K = 8 / BITS_K, IN_BYTE_V = 8 / BITS_V;                     // quarters
constexpr int KP = PARTS_K * KC, VP = PARTS_V * VC, PIECES = KP + VP;             // pieces of a record
constexpr int SUMS = IN_BYTE_K < 4 / GK ? IN_BYTE_K : 4 / GK;                     // of products, for a group of keys
// Query rows of a KV head: HEADS of each query token of a request, of which there is one, or one for each draft.
constexpr int NODES = DRAFTS ? DRAFTS : 1, HEADS = GROUP / NODES;
// Query heads of a warp, in n-tiles of four; two of these share the eight columns of a product with values.
constexpr int GW = (GROUP + VH - 1) / VH, NT = GW <= 4 ? 1 : (GW + 7) / 8 * 2, PAIRS = (NT + 1) / 2, MT = DV / 16;
// Threads that the compiler leaves registers for. Where outputs are few, code for more of them is faster.
constexpr int ROOM = BLOCKS == 1 && PAIRS * MT <= 8 ? THREADS + 128 : THREADS;
// With more than four query heads a warp takes a bfloat16 query as one byte, and one in float16 as it is.
constexpr bool MANY_ROWS = NT > 1 && QUERY != 2;
constexpr int TILE = 32 * TW, ROW_UNITS = HB * PIECES, AFFINE = 4 * (GK + GV), AFFINE_ROW = HB * AFFINE;
constexpr int AU = AFFINE_ROW % 16 == 0 ? 16 : AFFINE_ROW % 8 == 0 ? 8 : 4, AFFINE_UNITS = AFFINE_ROW / AU;
constexpr bool AFFINE_TURNED = AU == 16 && (16 % AFFINE == 0 || AFFINE % 16 == 0);  // no word leaves its 16 bytes
constexpr int CODE_BYTES = TILE * ROW_UNITS * 16, STAGE_BYTES = (CODE_BYTES + TILE * AFFINE_ROW + 127) / 128 * 128;
constexpr int COPIES = TILE * ROW_UNITS / 32, AFFINE_COPIES = TILE * AFFINE_UNITS / 32;  // of a lane
constexpr int STEP = 16 * TW;                            // window tokens of one step of a block
// The token groups of a block merge their results in the memory of its tiles.
constexpr int GATHERED_ROW = DV + 8, GATHERED = TW > 1 ? WARPS * GW * (GATHERED_ROW * 4 + 8) : 0;
constexpr int TILE_BYTES = STAGES * STAGE_BYTES > GATHERED ? STAGES * STAGE_BYTES : GATHERED;
constexpr int LEFT = HB * VH * GW;  // rows of results of a segment
constexpr float NEVER = -1e30f, HEADROOM = 8.f;
// Many rows of a query in bytes have weights in bfloat16, which keeps their products with any scale of values in range.
// They are 2^BIAS times as large, so that products with codes, bfloat16 subnormals, are not too small for a float.
constexpr bool COARSE = MANY_ROWS && QUERY == 0;
constexpr int BIAS = COARSE ? 64 : 0;
constexpr float MOST = 0x1p104f;  // sum of such weights of a row; a lane's part of all that fit into memory is less

template <bool, class A, class>
struct Either {
  typedef A type;
};
template <class A, class B>
struct Either<false, A, B> {
  typedef B type;
};
// Partial results of bfloat16 outputs have 16 bits, which take half as long to store and to merge.
typedef Either<QUERY == 0, u16, float>::type Part;

struct Params {
  const void* query;
  const u8 *codes, *affine;
  const unsigned short *ring_k, *ring_v, *sink_k, *sink_v;
  const INDPTR_T* indptr;
  const SLOT_T* slots;
  const ROW_T* rows;
  const int *sink_block, *sink_from, *ring_start;
  Part* partial;         // [segments, LEFT, DV]: means of values by the weights of a segment
  float2* stats;         // [segments, LEFT]: running maximum (base 2), sum
  int* plan;             // see `Plan`
  void* out;             // [batch * NODES, heads * HEADS, DV]
  const float* partner;  // [1 | heads, DV, DV] or null
  float scale, cap;      // see `logit`
  int batch, heads, recent, sink, partner_heads, blocks;
  u32 code_stride, affine_stride;  // bytes of a slot
  int prefix_stable;               // all rows but the NODES newest of every request are older than the kernel in front
  int ring_rows;                   // positions of a ring, at least `recent`
  const int* mask;                 // [batch, DRAFTS]: bit i of node j: j sees i; null for a chain
  const float* sink_logits;        // one of each query row with LEARNED, see `normalizer`
  int sink_logits_token, sink_logits_head;  // strides
};

struct Request {
  int first, length, sink_from, sink_end, ring_from, row, sink_block;
};

DEV constexpr int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }
// Lowest bit of quarter `r` in its byte, and a mask of the fields of the i-th quarter of a byte.
template <int BITS>
DEV constexpr int field_bit(int r) {
  return r * BITS % 8;
}
template <int BITS>
DEV constexpr u32 fields(u32 ones, int i) {
  return ones * ((1 << BITS) - 1) << (BITS * i);
}

DEV u32 shifted(u32 x, int left) { return left < 0 ? x >> -left : x << left; }
DEV float low_affine(u32 x) { return AFFINE_BF16 ? low_bf16(x) : low_f16(x); }
DEV float high_affine(u32 x) { return AFFINE_BF16 ? high_bf16(x) : high_f16(x); }

// Waits once for the kernel in front, and releases the one behind, if this one is `ahead` of its end.
DEV void meet(bool& ahead) {
  if (ahead) wait_then_release();
  ahead = false;
}
// Spreads the 16-byte units that eight consecutive tokens hold in one column over all banks: unit `unit` of a token lies
// at `unit ^ turn(token)`. Of tokens with no bit in common, turn(a + b) = turn(a) ^ turn(b).
template <int UNITS>
DEV constexpr int turn(int token) {
  return UNITS % 8 == 0 ? token & 7 : UNITS % 4 == 0 ? token >> 1 & 3 : UNITS % 2 == 0 ? token >> 2 & 1 : 0;
}
template <int UNITS>
DEV int swizzle(int token, int unit) {
  return unit ^ turn<UNITS>(token);
}

// Channels `at .. at + 3` of the query, `at` a multiple of four.
DEV uint2 query_words(const Params& p, size_t at) {
  return __ldcg(reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(p.query) + at));
}
DEV void query_four(const Params& p, size_t at, float (&x)[4]) {
  if constexpr (QUERY == 2) {
    const float4 y = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(p.query) + at));
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
    const uint2 y = query_words(p, at);
    x[0] = QUERY == 1 ? low_f16(y.x) : low_bf16(y.x), x[1] = QUERY == 1 ? high_f16(y.x) : high_bf16(y.x);
    x[2] = QUERY == 1 ? low_f16(y.y) : low_bf16(y.y), x[3] = QUERY == 1 ? high_f16(y.y) : high_bf16(y.y);
  }
}
DEV float2 query_pair(const Params& p, size_t at) {
  if constexpr (QUERY == 2) return __ldcg(reinterpret_cast<const float2*>(static_cast<const float*>(p.query) + at));
  const u32 x = __ldcg(reinterpret_cast<const u32*>(static_cast<const unsigned short*>(p.query) + at));
  return QUERY == 1 ? make_float2(low_f16(x), high_f16(x)) : make_float2(low_bf16(x), high_bf16(x));
}

// Verification: the last DRAFTS tokens of a request are drafts, and each has a query. What its rows see.

// Query rows of one KV head of a request: those of its NODES query tokens, HEADS each. A warp takes GW of them.
struct QueryRows {
  size_t first, gap;  // rows of the tensors of queries and outputs: the first, and those of other heads in between
  int skip;
  DEV QueryRows(const Params& p, int b, int head, int part)
      : first(((size_t)b * NODES * p.heads + head) * HEADS), gap((size_t)(p.heads - 1) * HEADS), skip(part * GW) {}
  // Of row `i` of the warp; an odd number of rows leaves the last warp one too few. Without a remainder: of
  // `row % 3` NVRTC 13.0 makes a negative 32-bit offset and forgets its sign.
  DEV size_t operator[](int i) const {
    const int row = GROUP % VH ? min(skip + i, GROUP - 1) : skip + i;
    return DRAFTS ? first + row + row / HEADS * gap : first + row;
  }
};

DEV int committed(const Request& r) { return DRAFTS ? max(0, r.length - DRAFTS) : r.length; }
// First position that a query token reads from its ring, like a decode step with `depth` more committed tokens.
DEV int ring_from(const Params& p, const Request& r, int depth) {
  return max(r.ring_from, committed(r) + depth + 1 - p.recent);
}
// End of the positions that some query reads from INT2.
DEV int int2_end(const Params& p, const Request& r) { return DRAFTS ? ring_from(p, r, DRAFTS - 1) : r.ring_from; }

// The INT2 positions of a request: all below `end` that the sink does not hold.
struct Positions {
  int cut, gap, count;
  DEV Positions(const Request& r, int end) {
    cut = min(r.sink_from, end);
    gap = max(0, min(r.sink_end, end) - cut);
    count = end - gap;
  }
  DEV int operator[](int i) const { return i + (i >= cut ? gap : 0); }
};

// What the rows of a lane see, `t, 4 + t, ...` of the warp.
struct Sight {
  const Params& p;
  const Request& r;
  int b, skip, t;
  // Drafts, one bit each.
  DEV u32 drafts(int n) const {
    const int node = min((skip + 4 * n + t) / HEADS, NODES - 1);
    return p.mask ? __ldg(p.mask + b * NODES + node) : (2u << node) - 1;
  }
  DEV int exact_from(u32 drafts) const { return ring_from(p, r, max(0, __popc(drafts) - 1)); }
  DEV bool sees(u32 drafts, int position) const {
    const int ahead = position - committed(r);
    if (ahead >= 0) return drafts >> (ahead & 31) & 1;
    return (position >= r.sink_from && position < r.sink_end) || position >= exact_from(drafts);
  }
};

// What a warp knows of its query heads so far; `z` sums p * offset. Lane t: heads t, 4 + t, ... of the warp.
struct State {
  float m[NT], l[NT], z[NT][GV], acc[PAIRS][MT][4], value_scale;
  DEV void clear() {
    value_scale = 1048576.f;
    UNROLL for (int i = 0; i < NT; i++) {
      m[i] = NEVER;
      l[i] = 0.f;
      UNROLL for (int v = 0; v < GV; v++) z[i][v] = 0.f;
    }
    UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int i = 0; i < MT; i++)
        acc[j][i][0] = acc[j][i][1] = acc[j][i][2] = acc[j][i][3] = 0.f;
  }
  // Raise the maxima to at least `top`; weights so far shrink with them. Also keeps scale * value_scale of values
  // within 64.
  DEV void rescale(const float (&top)[NT], float largest, bool empty = false) {
    float factor[NT], change = 1.f;
    UNROLL for (int o = 4; o < 32; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, o));
    if (!COARSE && largest * value_scale > 64.f) {
      const float next = __uint_as_float((u32)(127 + 5 + 127 - (int)(__float_as_uint(largest) >> 23)) << 23);
      change = next * __uint_as_float((254u << 23) - __float_as_uint(value_scale));
      value_scale = next;  // powers of two
    }
    UNROLL for (int i = 0; i < NT; i++) {
      float t = top[i];
      UNROLL for (int o = 4; o < 32; o *= 2) t = fmaxf(t, __shfl_xor_sync(ALL, t, o));
      t = fmaxf(m[i], t);
      factor[i] = ex2(m[i] - t);
      m[i] = t;
      l[i] *= factor[i];
      UNROLL for (int v = 0; v < GV; v++) z[i][v] *= factor[i];
    }
    if (empty) return;  // nothing to shrink, nor to fetch the code for
    UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int i = 0; i < MT; i++) {
      const float even = factor[2 * j] * change, odd = factor[NT == 1 ? 0 : 2 * j + 1] * change;
      acc[j][i][0] *= even;
      acc[j][i][1] *= odd;
      acc[j][i][2] *= even;
      acc[j][i][3] *= odd;
    }
  }
};

// `x` is the logit in base 2, or twice the logit over the cap in base 2, see the launcher.
DEV float logit(const Params& p, float x) { return CAPPED ? p.cap * (1.f - __fdividef(2.f, 1.f + ex2(x))) : x; }

// Neighbouring channels of a row of results.
DEV void leave_channels(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }
DEV u32 pack_part(float x, float y) { return AFFINE_BF16 ? pack_bf16(x, y) : pack_f16(x, y); }
DEV void leave_channels(u16* to, float x, float y) { store_word(to, pack_part(x, y)); }
DEV void leave_channels(float* to, const float4& x) { *reinterpret_cast<float4*>(to) = x; }
DEV void leave_channels(u16* to, const float4& x) { store_words(to, {pack_part(x.x, x.y), pack_part(x.z, x.w)}); }
// Of a sum over weights, one over them.
DEV float one_over(float l) { return l > 0.f ? __fdividef(1.f, l) : 0.f; }

// Where a warp leaves its results: one row for each of its query heads.
template <class T>
struct Results {
  T* rows;
  int width;
  float2* stats;
};

// Lane (g, t) has channels of heads t, 4 + t, ...
template <class T>
DEV void store_partial(State& s, const Results<T>& to, bool window, int lane) {
  const int g = lane / 4, t = lane % 4;
  const float unit = COARSE ? __uint_as_float((127u + 133 - BIAS) << 23)
                            : 16777216.f * __uint_as_float((254u << 23) - __float_as_uint(s.value_scale));
  UNROLL for (int n = 0; n < NT; n++) {
    if (BIAS && !window) {
      const float back = __uint_as_float((127u - BIAS) << 23);
      s.m[n] += BIAS;
      s.l[n] *= back;
      UNROLL for (int v = 0; v < GV; v++) s.z[n][v] *= back;
    }
    UNROLL for (int o = 4; o < 32; o *= 2) {
      s.l[n] += __shfl_xor_sync(ALL, s.l[n], o);
      UNROLL for (int v = 0; v < GV; v++) s.z[n][v] += __shfl_xor_sync(ALL, s.z[n][v], o);
    }
    if (4 * n + t >= GW) continue;
    T* out = to.rows + (4 * n + t) * to.width;
    if (g == 0) to.stats[4 * n + t] = make_float2(s.m[n], s.l[n]);
    const float share = TW > 1 ? 1.f : one_over(s.l[n]);  // of sums that are not yet merged
    float y[MT][2];  // rows g and g + 8 of the products
    UNROLL for (int m = 0; m < MT; m++) UNROLL for (int i = 0; i < 2; i++)
        y[m][i] = NT == 1 ? s.acc[0][m][2 * i] + s.acc[0][m][2 * i + 1] : s.acc[n / 2][m][2 * i + n % 2];
    if (window) {  // eight channels of every 64
      UNROLL for (int c = 0; c < DV / 64; c++) UNROLL for (int k = 0; k < 8; k += 4) {
        float z[4];
        UNROLL for (int i = 0; i < 4; i++) z[i] = VC == 1 ? y[(k + i) / 2][(k + i) % 2] : y[c / 2 * 8 + k + i][c % 2];
        leave_channels(out + 64 * c + 8 * g + k, make_float4(z[0] * share, z[1] * share, z[2] * share, z[3] * share));
      }
    } else {  // two of every 16 of a quarter
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < DV / 64; c++) {
        const float factor = unit * share / (1 << field_bit<BITS_V>(r)), offset = s.z[n][r * GV / 4] * share;
        const int m = VC == 1 ? r : (c / 2 * 4 + r) * 2;
        leave_channels(out + r * (DV / 4) + 16 * c + 2 * g, fmaf(y[m][VC == 1 ? 0 : c % 2], factor, offset),
                       fmaf(VC == 1 ? y[m][1] : y[m + 1][c % 2], factor, offset));
      }
    }
  }
}
