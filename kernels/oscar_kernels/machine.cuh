// The machine's instructions as functions: beside CUDA's own, all that the kernels use. Nothing of CUDA is included.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define ALL 0xFFFFFFFFu
constexpr bool OVERLAPS = __CUDA_ARCH__ >= 900;

DEV u8* dynamic_shared() {
  extern __shared__ __align__(128) u8 memory[];
  return memory;
}
DEV u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }
// N words that are next to each other.
template <int N>
DEV void shared_load(u32 at, u32* x) {
  if constexpr (N == 4)
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
  else if constexpr (N == 2)
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at));
  else
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x[0]) : "r"(at));
}
DEV float shared_float(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
DEV void shared_store(u32 at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}
DEV void store_word(void* to, u32 x) { *static_cast<u32*>(to) = x; }
DEV void store_words(void* to, const u32 (&x)[1]) { store_word(to, x[0]); }
DEV void store_words(void* to, const u32 (&x)[2]) { *static_cast<uint2*>(to) = make_uint2(x[0], x[1]); }
DEV void store_words(void* to, const u32 (&x)[4]) { *static_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]); }
// Without a place in the first-level cache.
DEV void load_once(uint4& x, const void* at) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at));
}
// What is made of `x` is not made before.
DEV void not_before(float& x) { asm volatile("" : "+f"(x)); }
DEV void not_before(long long& x) { asm volatile("" : "+l"(x)); }
template <class T>
DEV void not_before(const T*& x) { asm volatile("" : "+l"(x)); }
// The compiler does not work `x` out again where it is used.
DEV void worked_out(const u8*& x) { asm("" : "+l"(x)); }
DEV void worked_out(u32& x) { asm("" : "+r"(x)); }
DEV void long_way() {}  // the emulator counts them

DEV float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal(float x) {  // near enough
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV u32 prmt(u32 a, u32 b, u32 s) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
// `low` and `high` become at most, and at least, the two numbers of x.
DEV void take_in_bf16(u32& low, u32& high, u32 x) {
  asm("min.bf16x2 %0, %0, %2; max.bf16x2 %1, %1, %2;" : "+r"(low), "+r"(high) : "r"(x));
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
// Of two numbers of 16 bits in a word, and two others.
#define PAIRWISE(NAME, INSTRUCTION)                               \
  DEV u32 NAME(u32 a, u32 b) {                                    \
    u32 d;                                                        \
    asm(INSTRUCTION " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));   \
    return d;                                                     \
  }
PAIRWISE(multiply_f16, "mul.rn.f16x2")
PAIRWISE(max_f16, "max.f16x2")
PAIRWISE(min_u16x2, "min.u16x2")
PAIRWISE(max_u16x2, "max.u16x2")
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
DEV float2 unpack_f16(u32 x) { return make_float2(low_f16(x), high_f16(x)); }
// Lane `l` gives the address of a row of 16 bytes: eight rows are a matrix; it gets numbers 2 (l % 4) and the next of
// row l / 4 of each.
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
// The first of a sum that begins with `first`, one number for each of a lane's two columns.
DEV void mma_u8_first(int (&c)[4], const int (&first)[2], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%10,%11};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(first[0]), "r"(first[1]));
}
DEV void mma_u8_half(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
#define PRODUCT(NAME, TYPE)                                                                                               \
  DEV void NAME(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {                                       \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));      \
  }
PRODUCT(mma_f16, "f16")
PRODUCT(mma_bf16, "bf16")
DEV void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
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
DEV void copy_async(u32 to, const void* from) {  // 16 bytes
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEV void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last N groups of copies have landed.
template <int N>
DEV void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
DEV void barrier_init(u32 at, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
DEV void arrive(u32 at) { asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(at) : "memory"); }
// This lane arrives once all its copies so far are done.
DEV void arrive_copies(u32 at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory"); }
#define WAIT_PHASE(HOW) \
  asm volatile("{.reg .pred p; again: mbarrier." HOW ".parity.shared.b64 p, [%0], %1; @!p bra again;}" ::"r"(at), \
               "r"(parity) \
               : "memory")
DEV void wait_phase(u32 at, u32 parity) {
  if constexpr (OVERLAPS)
    WAIT_PHASE("try_wait");
  else
    WAIT_PHASE("test_wait");
}
// A kernel may be launched before the one in front has ended. Before this it reads only what that one cannot have written:
// weights, and the batch's own tensors and stable rows, which must be older.
DEV void wait_for_previous() {
  if constexpr (OVERLAPS) asm volatile("griddepcontrol.wait;" ::: "memory");
}
DEV void dependents_may_start() {
  if constexpr (OVERLAPS) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// After it the next one may come.
DEV void wait_then_release() {
  wait_for_previous();
  dependents_may_start();
}

// The tensor cores read shared memory past the caches' order: whoever wrote it says so before the others go on.
DEV void fence_for_matrix_units() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Descriptor of columns of 128 bytes, 16-byte units turned by the column: eight columns are 1024 bytes.
DEV u64 columns_address(u32 at) { return (u64)(at >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
// The same of columns of 32 bytes: first halves of eight columns, then their second halves, are 256 bytes.
DEV u64 narrow_columns_address(u32 at) { return (u64)(at >> 4 & 0x3FFF) | 8ull << 16 | 16ull << 32; }
template <int N>
DEV void matrix_begin(float (&x)[N]) {
  UNROLL for (int i = 0; i < N; i++) {
    x[i] = 0.f;
    asm volatile("" : "+f"(x[i])::"memory");
  }
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
#define F4(i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define R32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
// x = (more ? x : 0) + a b^T of a warpgroup: 64 rows of `a`, 16 columns of both. Thread `l` of warp `w` gives columns
// 2 (l % 4) + e + 8 i of rows 16 w + l / 4 and that + 8, as bfloat16 pairs in a[2 i] and a[2 i + 1]; it gets columns
// 8 j + 2 (l % 4) + e of rows 16 w + l / 4 + 8 i in x[4 j + 2 i + e].
DEV void matrix_multiply(float (&x)[32], const u32 (&a)[4], u64 b, bool more) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" R32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : F16(0), F16(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));
}
// The same with the rows of `a` in shared memory, as columns are.
DEV void matrix_multiply_tile(float (&x)[32], u64 a, u64 b, bool more) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" R32
      "}, %32, %33, p, 1, 1, 0, 0;}"
      : F16(0), F16(16)
      : "l"(a), "l"(b), "r"((int)more));
}
DEV void matrix_multiply(float (&x)[64], const u32 (&a)[4], u64 b, bool more) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R32 ", "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
      : F16(0), F16(16), F16(32), F16(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more));
}
DEV void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEV void matrix_end(float (&x)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
