// Shapes, parameters, and the machine's instructions as functions.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
#define DEV __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define ALL 0xFFFFFFFFu

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
// With more than four query heads a warp takes them in float16, as long as they have 16 bits.
constexpr bool HALF_QUERY = NT > 1 && QUERY != 2;
constexpr int TILE = 32 * TW, ROW_UNITS = HB * PIECES, AFFINE = 4 * (GK + GV), AFFINE_ROW = HB * AFFINE;
constexpr int AU = AFFINE_ROW % 16 == 0 ? 16 : AFFINE_ROW % 8 == 0 ? 8 : 4, AFFINE_UNITS = AFFINE_ROW / AU;
constexpr bool AFFINE_TURNED = AU == 16 && (16 % AFFINE == 0 || AFFINE % 16 == 0);  // no word leaves its 16 bytes
constexpr int CODE_BYTES = TILE * ROW_UNITS * 16, STAGE_BYTES = (CODE_BYTES + TILE * AFFINE_ROW + 127) / 128 * 128;
constexpr int COPIES = TILE * ROW_UNITS / 32, AFFINE_COPIES = TILE * AFFINE_UNITS / 32;  // of a lane
constexpr int RING_BYTES = STAGES * (STAGE_BYTES + 16);  // tiles, then two barriers for each
constexpr int STEP = 16 * TW;                            // window tokens of one step of a block
constexpr float NEVER = -1e30f, HEADROOM = 8.f;

struct Params {
  const void* query;
  const u8 *codes, *affine;
  const unsigned short *ring_k, *ring_v, *sink_k, *sink_v;
  const INDPTR_T* indptr;
  const SLOT_T* slots;
  const ROW_T* rows;
  const int *sink_block, *sink_from, *ring_start;
  float* partial;        // [segments, WARPS, GW, DV]
  float2* stats;         // [segments, WARPS, GW]: running maximum (base 2), sum
  int* prefix;           // [2 * batch + 1] units
  void* out;             // [batch * NODES, heads * HEADS, DV]
  const float* partner;  // [1 | heads, DV, DV] or null
  float scale, cap;      // see `logit`
  int batch, heads, recent, sink, partner_heads, blocks;
  u32 code_stride, affine_stride;  // bytes of a slot
  int prefix_stable;               // all rows but the NODES newest of every request are older than the kernel in front
  int ring_rows;                   // positions of a ring, at least `recent`
  const int* mask;                 // [batch, DRAFTS]: bit i of node j: j sees i; null for a chain
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

DEV u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }
DEV float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV u32 prmt(u32 a, u32 b, u32 s) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
DEV u32 transpose(u32 x) {
  u32 d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
  return d;
}
DEV u32 pack_f16(float lo, float hi) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
DEV u32 pack_bf16(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
DEV float low_bf16(u32 x) { return __uint_as_float(x << 16); }
DEV float high_bf16(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }
DEV float low_f16(u32 x) {
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(x));
  return y;
}
DEV float high_f16(u32 x) {
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
  return y;
}
DEV float low_affine(u32 x) { return AFFINE_BF16 ? low_bf16(x) : low_f16(x); }
DEV float high_affine(u32 x) { return AFFINE_BF16 ? high_bf16(x) : high_f16(x); }

DEV void ldmatrix4(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a));
}
DEV void ldmatrix2(u32& r0, u32& r1, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(a));
}
DEV void ldmatrix4_trans(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a));
}
DEV void ldmatrix2_trans(u32& r0, u32& r1, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(a));
}
DEV void mma_u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_u8_half(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
DEV void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_f16_half(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
DEV void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// Copies BYTES, or zeros where `valid` is false; `from` must be an address that may be read either way.
template <int BYTES>
DEV void copy_async(u32 to, const void* from, bool valid) {
  const int n = valid ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(n) : "memory");
}
DEV void barrier_init(u32 at, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
DEV void arrive(u32 at) { asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(at) : "memory"); }
// This lane arrives once all its copies so far are done.
DEV void arrive_copies(u32 at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory"); }
DEV void wait_phase(u32 at, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again;}" ::"r"(at),
               "r"(parity)
               : "memory");
#else
  asm volatile("{.reg .pred p; again: mbarrier.test_wait.parity.shared.b64 p, [%0], %1; @!p bra again;}" ::"r"(at),
               "r"(parity)
               : "memory");
#endif
}
// Both kernels may be launched before the one in front has ended. Before this they read only what that one cannot have
// written: weights, and the batch's own tensors and stable rows, which must be older. After it the next one may come.
#if __CUDA_ARCH__ >= 900
constexpr bool OVERLAPS = true;
#else
constexpr bool OVERLAPS = false;
#endif
DEV void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
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
