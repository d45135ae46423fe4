// The machine's instructions as functions; all that the other files use. Nothing of CUDA is included.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define KERNEL(name, threads, parameters) \
  extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ parameters)
#define ALL 0xFFFFFFFFu

DEV int thread_index() { return threadIdx.x; }
DEV int block_index() { return blockIdx.x; }
DEV u32 dynamic_shared() {
  extern __shared__ u8 memory[];
  return (u32)__cvta_generic_to_shared(memory);
}

// From here on: what is made of `x` is not made before.
DEV void not_before(long long& x) { asm volatile("" : "+l"(x)); }
DEV void long_way() {}  // the emulator counts them

DEV u32 bits_of(float x) { return __float_as_uint(x); }
DEV float float_of(u32 x) { return __uint_as_float(x); }
DEV float multiply(float x, float y) { return __fmul_rn(x, y); }
DEV float saturate(float x) { return __saturatef(x); }  // NaN becomes 0
DEV float reciprocal(float x) {                         // near enough
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV u32 multiply_high(u32 x, u32 y) { return __umulhi(x, y); }
DEV u32 permute(u32 a, u32 b, u32 bytes) { return __byte_perm(a, b, bytes); }
DEV u32 min_u16x2(u32 a, u32 b) {
  u32 c;
  asm("min.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
DEV u32 max_u16x2(u32 a, u32 b) {
  u32 c;
  asm("max.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
DEV u32 pack_f16(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
DEV u32 pack_bf16(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
// Two floats of two halves.
DEV float2 unpack_f16(u32 x) {
  float2 y;
  asm("{.reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b;}" : "=f"(y.x), "=f"(y.y) : "r"(x));
  return y;
}

// All lanes of a warp take part.
template <class T>
DEV T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(ALL, x, mask);
}
DEV u32 shuffle_from(u32 x, int lane) { return __shfl_sync(ALL, x, lane); }
DEV bool any(bool x) { return __any_sync(ALL, x); }
DEV u32 vote(bool x) { return __ballot_sync(ALL, x); }
DEV int last_one(u32 x) { return 31 - __clz(x); }  // the highest bit that is set
DEV int count(bool x) { return __popc(__ballot_sync(ALL, x)); }
DEV int reduce_max(int x) { return __reduce_max_sync(ALL, x); }

DEV void block_sync() { __syncthreads(); }
DEV void warp_sync() { __syncwarp(); }
DEV void dependents_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEV void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEV void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
DEV void copy_async(u32 to, const void* from) {  // 16 bytes to shared memory
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEV void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEV void copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
// For all groups but the last N.
template <int N>
DEV void copies_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Thread `l` of a warp gives the address of a row of 16 bytes: eight rows are a matrix; it gets numbers 2 (l % 4) and
// the next of row l / 4 of four matrices.
DEV void load_operand(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
DEV float shared_load(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
DEV void shared_words(u32 at, u32 (&x)[1]) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x[0]) : "r"(at) : "memory");
}
DEV void shared_words(u32 at, u32 (&x)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
}
DEV void shared_words(u32 at, u32 (&x)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
DEV void shared_store(u32 at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}
DEV void store_byte(u8* to, u8 x) { *to = x; }
DEV void store_half(u16* to, u16 x) { *to = x; }
DEV void store_word(void* to, u32 x) { *static_cast<u32*>(to) = x; }
DEV void store_words(void* to, const u32 (&x)[1]) { *static_cast<u32*>(to) = x[0]; }
DEV void store_words(void* to, const u32 (&x)[2]) { *static_cast<uint2*>(to) = make_uint2(x[0], x[1]); }
DEV void store_words(void* to, const u32 (&x)[4]) { *static_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]); }

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
