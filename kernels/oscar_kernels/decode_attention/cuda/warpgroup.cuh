// Products of a warpgroup, four warps, of compute capability 9.0, and how its warps meet. What a product has in registers
// and in shared memory is its own until `products_wait`.
#pragma once

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
// 16 w + l / 4 and that + 8, as pairs of float16, or bfloat16, in a[2 i] and a[2 i + 1]; x[4 j + 2 i + e] is column
// 8 j + 2 (l % 4) + e of row 16 w + l / 4 + 8 i.
#define PRODUCT(TYPE, COLUMNS, SUMS, FACTOR, B, MORE, ...)                                                   \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " MORE ", 0; wgmma.mma_async.sync.aligned.m64n" COLUMNS           \
               "k16.f32." TYPE "." TYPE " {" SUMS "}, {" FACTOR "}, " B ", p, 1, 1, 0;}"                         \
               : __VA_ARGS__                                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more))
#define FOUR(i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define PRODUCTS(TYPE)                                                                                           \
  if constexpr (N == 4)                                                                                          \
    PRODUCT(TYPE, "8", "%0, %1, %2, %3", "%4, %5, %6, %7", "%8", "%9", FOUR(0));                              \
  else if constexpr (N == 8)                                                                                     \
    PRODUCT(TYPE, "16", "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9, %10, %11", "%12", "%13", FOUR(0), FOUR(4)); \
  else if constexpr (N == 12)                                                                                    \
    PRODUCT(TYPE, "24", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11", "%12, %13, %14, %15", "%16",     \
            "%17", FOUR(0), FOUR(4), FOUR(8));                                                                   \
  else                                                                                                           \
    PRODUCT(TYPE, "32", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",              \
            "%16, %17, %18, %19", "%20", "%21", FOUR(0), FOUR(4), FOUR(8), FOUR(12))
template <bool BFLOAT, int N>
DEV void group_multiply(float (&x)[N], const u32 (&a)[4], u32 operand, bool more) {
  const u64 b = 16ull << 32 | operand;
  if constexpr (BFLOAT) {
    PRODUCTS("bf16");
  } else {
    PRODUCTS("f16");
  }
}
DEV void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// For all products but those of the last N times `products_commit`.
template <int N>
DEV void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// What products have in registers is made no later than here, and used, and changed, no earlier.
template <int N>
DEV void settled(float (&x)[N]) {
  UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
DEV void settled(u32 (&x)[N]) {
  UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}
