// Shapes and parameters.
#pragma once

#include "machine.cuh"

constexpr int WARPS = HB * VH * TW, THREADS = WARPS * 32;
// A row of codes is BITS / 2 parts, one behind the other (layout.py). Byte j of a part has the codes of channel j of
// 4, or 2, neighbouring quarters of the row. A part has KC or VC pieces of 16 bytes.
constexpr int KC = DK / 64, VC = DV / 64, PARTS_K = BITS_K / 2, PARTS_V = BITS_V / 2;
constexpr int IN_BYTE_K = 8 / BITS_K, IN_BYTE_V = 8 / BITS_V;                     // quarters
constexpr int KP = PARTS_K * KC, VP = PARTS_V * VC, PIECES = KP + VP;             // pieces of a record
constexpr int SUMS = IN_BYTE_K < 4 / GK ? IN_BYTE_K : 4 / GK;                     // of products, for a group of keys
// Query rows of a KV head: HEADS of each query token of a request, of which there is one, or one for each draft.
constexpr int NODES = DRAFTS ? DRAFTS : 1, HEADS = GROUP / NODES;
// Query heads of a warp, in n-tiles of four; two of these share the eight columns of a product with values.
constexpr int GW = (GROUP + VH - 1) / VH, NT = GW <= 4 ? 1 : (GW + 7) / 8 * 2, PAIRS = (NT + 1) / 2, MT = DV / 16;
// With more than four query heads a warp takes a bfloat16 query as one byte, and one in float16 as it is.
constexpr bool MANY_ROWS = NT > 1 && QUERY != 2;
constexpr int TILE = 32 * TW, ROW_UNITS = HB * PIECES, AFFINE = 4 * (GK + GV), AFFINE_ROW = HB * AFFINE;
constexpr int AU = AFFINE_ROW % 16 == 0 ? 16 : AFFINE_ROW % 8 == 0 ? 8 : 4, AFFINE_UNITS = AFFINE_ROW / AU;
constexpr bool AFFINE_TURNED = AU == 16 && (16 % AFFINE == 0 || AFFINE % 16 == 0);  // no word leaves its 16 bytes
constexpr int CODE_BYTES = TILE * ROW_UNITS * 16, STAGE_BYTES = (CODE_BYTES + TILE * AFFINE_ROW + 127) / 128 * 128;
constexpr int COPIES = TILE * ROW_UNITS / 32, AFFINE_COPIES = TILE * AFFINE_UNITS / 32;  // of a lane
constexpr int RING_BYTES = STAGES * (STAGE_BYTES + 16);  // tiles, then two barriers for each
constexpr int STEP = 16 * TW;                            // window tokens of one step of a block
// The token groups of a block merge their results in the memory of its tiles, where that has room; GROUPS leave one each.
constexpr int GATHERED_ROW = DV + 8, GATHERED = WARPS * GW * (GATHERED_ROW * 4 + 8);
constexpr bool GATHERS = TW > 1 && GATHERED <= STAGES * STAGE_BYTES;
constexpr int GROUPS = GATHERS ? 1 : TW, LEFT = HB * VH * GROUPS;  // results of a segment, of GW rows each
constexpr float NEVER = -1e30f, HEADROOM = 8.f;

struct Params {
  const void* query;
  const u8 *codes, *affine;
  const unsigned short *ring_k, *ring_v, *sink_k, *sink_v;
  const INDPTR_T* indptr;
  const SLOT_T* slots;
  const ROW_T* rows;
  const int *sink_block, *sink_from, *ring_start;
  float* partial;        // [segments, LEFT, GW, DV]
  float2* stats;         // [segments, LEFT, GW]: running maximum (base 2), sum
  int* prefix;           // [2 * batch + 1] units
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
  int first, length, sink_from, sink_end, ring_from;
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

DEV float low_affine(u32 x) { return AFFINE_BF16 ? low_bf16(x) : low_f16(x); }
DEV float high_affine(u32 x) { return AFFINE_BF16 ? high_bf16(x) : high_f16(x); }

// The same once, if `ahead` of its end.
DEV void meet(bool& ahead) {
  if (ahead) wait_for_previous();
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
DEV void query_four(const Params& p, size_t at, float (&x)[4]) {
  if constexpr (QUERY == 2) {
    const float4 y = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(p.query) + at));
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
    const uint2 y = __ldcg(reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(p.query) + at));
    x[0] = QUERY == 1 ? low_f16(y.x) : low_bf16(y.x), x[1] = QUERY == 1 ? high_f16(y.x) : high_bf16(y.x);
    x[2] = QUERY == 1 ? low_f16(y.y) : low_bf16(y.y), x[3] = QUERY == 1 ? high_f16(y.y) : high_bf16(y.y);
  }
}
DEV float2 query_pair(const Params& p, size_t at) {
  if constexpr (QUERY == 2) return __ldcg(reinterpret_cast<const float2*>(static_cast<const float*>(p.query) + at));
  const u32 x = __ldcg(reinterpret_cast<const u32*>(static_cast<const unsigned short*>(p.query) + at));
  return QUERY == 1 ? make_float2(low_f16(x), high_f16(x)) : make_float2(low_bf16(x), high_bf16(x));
}
