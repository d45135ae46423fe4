// The machine's instructions as functions: beside CUDA's own, all that the other files use. Nothing of CUDA is included.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
#define DEV __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define ALL 0xFFFFFFFFu

DEV u8* dynamic_shared() {
  extern __shared__ __align__(128) u8 memory[];
  return memory;
}
DEV u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }
// N words that are next to each other.
template <int N>
DEV void shared_load(u32* x, u32 at) {
  if constexpr (N == 4)
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
  else if constexpr (N == 2)
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at));
  else
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x[0]) : "r"(at));
}
// Without a place in the first-level cache.
DEV void load_once(uint4& x, const void* at) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at));
}
// What is made of `x` is not made before.
DEV void not_before(float2& x) { asm volatile("" : "+f"(x.x), "+f"(x.y)); }
// The compiler does not work `x` out again where it is used.
DEV void worked_out(const u8*& x) { asm("" : "+l"(x)); }

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
// Products of a warpgroup, four warps, for compute capability 9.0. One waits in registers and in shared memory until
// `products_wait`.
template <int N>
DEV void shared_store(u32 at, const u32 (&x)[N]) {
  if constexpr (N == 4)
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
  else
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x[0]) : "memory");
}
// Stores eight rows and columns of 16-bit numbers for every word, column after column: of the i-th matrix a lane has
// columns 2 (l % 4) and the next of row l / 4, and lane 8 i + j says where its column j goes.
template <int N>
DEV void stmatrix_trans(u32 at, const u32 (&x)[N]) {
  if constexpr (N == 4)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(x[0]), "r"(x[1])
                 : "memory");
}
// Barrier `id` of a warpgroup; the second one tells whether `x` is true for one of its threads.
DEV void group_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
DEV bool group_any(int id, bool x) {
  int any;
  asm volatile("{.reg .pred p, q; setp.ne.b32 q, %2, 0; bar.red.or.pred p, %1, 128, q; selp.b32 %0, 1, 0, p;}"
               : "=r"(any)
               : "r"(id), "r"((int)x)
               : "memory");
  return any;
}
// Whoever wrote what products read in shared memory says so before the others go on.
DEV void fence_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What says where an operand of products is: the first word of the descriptor of 16 numbers of each of its columns, 8
// of eight columns one behind the other in 128 bytes, then their other 8. `bytes` later lies `bytes / 16` more.
DEV u32 operand(u32 at) { return (at >> 4 & 0x3FFF) + (8u << 16); }
// Before products, once what they read and add to is in its registers.
DEV void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// x = (more ? x : 0) + a b of 64 rows and 2 N columns. Thread `l` of warp `w` gives columns 2 (l % 4) + e + 8 i of rows
// 16 w + l / 4 and that + 8, as float16 pairs in a[2 i] and a[2 i + 1]; x[4 j + 2 i + e] is column 8 j + 2 (l % 4) + e
// of row 16 w + l / 4 + 8 i.
template <int N>
DEV void group_multiply(float (&x)[N], const u32 (&a)[4], u32 operand, bool more) {
  const u64 b = 16ull << 32 | operand;
  if constexpr (N == 4)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, %8, p, 1, 1, 0;}"
        : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));
  else if constexpr (N == 8)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, "
        "%4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
        : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));
  else if constexpr (N == 12)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %17, 0; wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 {%0, %1, %2, %3, "
        "%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, p, 1, 1, 0;}"
        : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
          "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));
  else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, "
        "%4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
        : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
          "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));
}
DEV void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// For all products but those of the last N times `products_commit`.
template <int N>
DEV void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// What products had in registers is used, and changed, no earlier than here.
template <int N>
DEV void settled(float (&x)[N]) {
  UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
DEV void settled(u32 (&x)[N]) {
  UNROLL for (int i = 0; i < N; i++) asm volatile("" ::"r"(x[i]) : "memory");
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
