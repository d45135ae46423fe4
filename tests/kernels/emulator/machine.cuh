// The machine of the kernels on a CPU, in place of their machine.cuh: the same functions, on fibers.
//
// Copies land as late as they may, when a warp waits for them or for their barrier, or (`eager`) at once. Reads of global
// memory are checked where they go through one of these functions, and those of shared memory but for arrays that a
// kernel declares. A product of a warpgroup reads shared memory when its warp waits for it; a fence left out before it is
// an error. The kernel in front has always ended.
#pragma once

#include "builtins.h"

#define DEV inline
#define UNROLL
#define UNROLL_1
#define ALL 0xFFFFFFFFu
constexpr bool OVERLAPS = true;

DEV u8* dynamic_shared() { return machine::shared.data(); }
DEV u32 shared_address(const void* x) { return machine::BASE + (u32)((const u8*)x - machine::shared.data()); }
template <int N>
DEV void shared_load(u32 at, u32* x) {
  memcpy(x, machine::at(at, 4 * N), 4 * N);
}
DEV float shared_float(u32 at) {
  u32 x;
  shared_load<1>(at, &x);
  return __uint_as_float(x);
}
DEV void shared_store(u32 at, float x, float y) {
  const float both[2] = {x, y};
  memcpy(machine::at(at, 8), both, 8);
}
DEV void store_word(void* to, u32 x) { memcpy(to, &x, 4); }
template <int N>
DEV void store_words(void* to, const u32 (&x)[N]) {
  machine::check((uintptr_t)to % (4 * N) == 0, "target of a store is not aligned");
  memcpy(to, x, 4 * N);
}
DEV void load_once(uint4& x, const void* at) { x = machine::load<uint4>(at); }
DEV void not_before(float&) {}
DEV void not_before(long long&) {}
template <class T> void not_before(const T*&) {}
DEV void worked_out(const u8*&) {}
DEV void worked_out(u32&) {}
DEV void long_way() { machine::long_ways += machine::current % 32 == 0; }

DEV float ex2(float x) { return exp2f(x); }
DEV float reciprocal(float x) { return (1.f + 2e-7f) / x; }  // off by what the machine may be off
DEV u32 prmt(u32 a, u32 b, u32 bytes) { return __byte_perm(a, b, bytes); }
DEV u32 min_u16x2(u32 a, u32 b) { return min(a & 0xFFFF, b & 0xFFFF) | min(a >> 16, b >> 16) << 16; }
DEV u32 max_u16x2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }

namespace machine {

// Half `i` of a word.
inline u16 half(u32 x, int i) { return (u16)(x >> 16 * i); }
inline u16 float16(float x) {
  const _Float16 y = (_Float16)x;
  u16 bits;
  memcpy(&bits, &y, 2);
  return bits;
}
inline float from_float16(u16 x) {
  static const std::vector<float> all = [] {  // a conversion takes long where the CPU has no instruction for it
    std::vector<float> y(1 << 16);
    for (u32 i = 0; i < y.size(); i++) {
      const u16 bits = (u16)i;
      _Float16 z;
      memcpy(&z, &bits, 2);
      y[i] = (float)z;
    }
    return y;
  }();
  return all[x];
}
inline u16 bfloat16(float x) {
  const u32 bits = __float_as_uint(x);
  return (u16)(x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float from_bfloat16(u16 x) { return __uint_as_float((u32)x << 16); }

}  // namespace machine

DEV u32 transpose(u32 x) {
  const u32* all = machine::exchange(x, 4);
  const int row = machine::current % 32 / 4, column = machine::current % 4 * 2;
  auto element = [=](int i, int j) { return machine::half(all[4 * i + j / 2], j % 2); };
  return element(column, row) | (u32)element(column + 1, row) << 16;
}
DEV u32 pack_f16(float lo, float hi) { return machine::float16(lo) | (u32)machine::float16(hi) << 16; }
DEV u32 pack_bf16(float lo, float hi) { return machine::bfloat16(lo) | (u32)machine::bfloat16(hi) << 16; }
DEV float low_bf16(u32 x) { return __uint_as_float(x << 16); }
DEV float high_bf16(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }
DEV void take_in_bf16(u32& low, u32& high, u32 x) {
  low = pack_bf16(fminf(low_bf16(low), low_bf16(x)), fminf(high_bf16(low), high_bf16(x)));
  high = pack_bf16(fmaxf(low_bf16(high), low_bf16(x)), fmaxf(high_bf16(high), high_bf16(x)));
}
DEV u32 multiply_f16(u32 a, u32 b) {
  auto of = [=](int i) { return machine::from_float16(machine::half(a, i)) * machine::from_float16(machine::half(b, i)); };
  return pack_f16(of(0), of(1));
}
DEV u32 max_f16(u32 a, u32 b) {
  auto of = [=](int i) { return fmaxf(machine::from_float16(machine::half(a, i)), machine::from_float16(machine::half(b, i))); };
  return pack_f16(of(0), of(1));
}
DEV float low_f16(u32 x) { return machine::from_float16(machine::half(x, 0)); }
DEV float high_f16(u32 x) { return machine::from_float16(machine::half(x, 1)); }
DEV float2 unpack_f16(u32 x) { return make_float2(low_f16(x), high_f16(x)); }

namespace machine {

// Matrices of eight rows of 16 bytes, from the addresses that lanes give; every lane gets two numbers of 16 bits of each.
template <int N>
void load_matrices(u32 (&x)[N], u32 address, bool transposed, u32 tag) {
  u32 rows[32];
  memcpy(rows, exchange(address, tag), sizeof rows);
  const int row = current % 32 / 4, column = current % 4 * 2;
  for (int i = 0; i < N; i++) {
    u16 both[2];
    for (int j = 0; j < 2; j++)
      memcpy(&both[j],
             transposed ? at(rows[8 * i + column + j], 16) + 2 * row : at(rows[8 * i + row], 16) + 2 * (column + j), 2);
    memcpy(&x[i], both, 4);
  }
}

// The types of a product, with how many numbers a word has.
struct Bytes {
  static constexpr int PER_WORD = 4;
  static float a(u32 x, int i) { return (float)(u8)(x >> 8 * i); }
  static float b(u32 x, int i) { return (float)(signed char)(x >> 8 * i); }
};
struct Float16 {
  static constexpr int PER_WORD = 2;
  static float a(u32 x, int i) { return from_float16(half(x, i)); }
  static float b(u32 x, int i) { return a(x, i); }
};
struct BFloat16 {
  static constexpr int PER_WORD = 2;
  static float a(u32 x, int i) { return from_bfloat16(half(x, i)); }
  static float b(u32 x, int i) { return a(x, i); }
};
struct Tf32 {
  static constexpr int PER_WORD = 1;
  static float a(u32 x, int) { return __uint_as_float(x & 0xFFFFE000u); }
  static float b(u32 x, int) { return a(x, 0); }
};
// Adds a product of 16 rows and 8 columns: words a[2 * part + (row >= 8)] and b[part] of lane 4 * (row % 8 or column) +
// i have numbers of every part, as many of them as four words have. Sums are exact to rounding once.
template <class T, class C, int PARTS>
void multiply(C (&c)[4], const u32 (&a)[2 * PARTS], const u32 (&b)[PARTS], u32 tag) {
  u32 words[3 * PARTS];
  memcpy(words, a, sizeof a);
  memcpy(words + 2 * PARTS, b, sizeof b);
  const auto all = exchange(words, tag);
  const int lane = current % 32;
  double sum[4] = {(double)c[0], (double)c[1], (double)c[2], (double)c[3]};
  for (int part = 0; part < PARTS; part++)
    for (int k = 0; k < 4; k++)
      for (int i = 0; i < T::PER_WORD; i++) {
        float x[2], y[2];
        for (int j = 0; j < 2; j++) {
          x[j] = T::a(all[2 * part + j][lane / 4 * 4 + k], i);
          y[j] = T::b(all[2 * PARTS + part][(lane % 4 * 2 + j) * 4 + k], i);
        }
        for (int j = 0; j < 4; j++) sum[j] += (double)x[j / 2] * y[j % 2];
      }
  for (int j = 0; j < 4; j++) c[j] = (C)sum[j];
}

}  // namespace machine

DEV void ldmatrix4(u32 (&x)[4], u32 at) { machine::load_matrices(x, at, false, 5); }
DEV void ldmatrix4_trans(u32 (&x)[4], u32 at) { machine::load_matrices(x, at, true, 7); }
DEV void ldmatrix2(u32& x0, u32& x1, u32 at) {
  u32 x[2];
  machine::load_matrices(x, at, false, 6);
  x0 = x[0], x1 = x[1];
}
DEV void ldmatrix2_trans(u32& x0, u32& x1, u32 at) {
  u32 x[2];
  machine::load_matrices(x, at, true, 8);
  x0 = x[0], x1 = x[1];
}
DEV void mma_u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  machine::multiply<machine::Bytes, int, 2>(c, {a0, a1, a2, a3}, {b0, b1}, 10);
}
DEV void mma_u8_first(int (&c)[4], const int (&first)[2], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  for (int i = 0; i < 4; i++) c[i] = first[i % 2];
  mma_u8(c, a0, a1, a2, a3, b0, b1);
}
DEV void mma_u8_half(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  machine::multiply<machine::Bytes, int, 1>(c, {a0, a1}, {b0}, 11);
}
DEV void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  machine::multiply<machine::Float16, float, 2>(c, {a0, a1, a2, a3}, {b0, b1}, 12);
}
DEV void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  machine::multiply<machine::BFloat16, float, 2>(c, {a0, a1, a2, a3}, {b0, b1}, 13);
}
DEV void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  auto bits = __float_as_uint;
  machine::multiply<machine::Tf32, float, 2>(c, {bits(a0), bits(a1), bits(a2), bits(a3)}, {bits(b0), bits(b1)}, 15);
}
DEV void mma_f16_half(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  machine::multiply<machine::Float16, float, 1>(c, {a0, a1}, {b0}, 14);
}

namespace machine {

// A barrier in shared memory.
struct Arrivals {
  short count, missing;
  u32 phase;
};
inline Arrivals& arrivals(u32 address) { return *(Arrivals*)at(address, 8); }
inline std::map<u32, std::vector<Copy>> underway;  // by the barrier that they arrive at
inline std::map<u32, int> lanes;                   // that arrive with them
inline void land(const std::vector<Copy>& copies) {  // their addresses were checked
  for (const Copy& x : copies) {
    u8* to = &shared[x.to - BASE];
    x.from ? memcpy(to, x.from, x.bytes) : memset(to, 0, x.bytes);
  }
}
inline void arrive_at(Arrivals& x) {
  if (--x.missing) return;
  x.missing = x.count;
  x.phase++;
}

}  // namespace machine

DEV void prefetch(const void* at) {
  machine::load<u8>(at);
  (void)*static_cast<const volatile u8*>(at);
}
template <int BYTES>
DEV void copy_async(u32 to, const void* from, bool valid) {
  struct alignas(BYTES) Unit {
    u8 bytes[BYTES];
  };
  machine::load<Unit>(from);
  machine::at(to, BYTES);
  const machine::Copy copy{to, BYTES, valid ? from : nullptr};
  if (machine::eager) machine::land({copy});
  machine::self().copies.push_back(copy);
}
DEV void copy_async(u32 to, const void* from) { copy_async<16>(to, from, true); }
DEV void commit_copies() { machine::self().groups.push_back(std::exchange(machine::self().copies, {})); }
template <int N>
DEV void wait_copies() {
  machine::Thread& t = machine::self();
  machine::check(t.copies.empty(), "copies that no group has");
  for (; t.groups.size() > N; t.groups.erase(t.groups.begin())) {
    machine::land(t.groups[0]);
    for (const machine::Copy& copy : t.groups[0]) t.unfenced.push_back(copy.to);
  }
}
DEV void barrier_init(u32 at, int count) {
  machine::arrivals(at) = {(short)count, (short)count, 0};
  machine::underway[at].clear();
  machine::lanes[at] = 0;
}
DEV void arrive(u32 at) { machine::arrive_at(machine::arrivals(at)); }
DEV void arrive_copies(u32 at) {
  machine::arrivals(at);
  auto& copies = machine::self().copies;
  auto& before = machine::underway[at];
  before.insert(before.end(), copies.begin(), copies.end());
  copies.clear();
  machine::lanes[at]++;
}
DEV void wait_phase(u32 at, u32 parity) {
  machine::Arrivals& x = machine::arrivals(at);
  machine::wait([&x, at, parity] {
    machine::land(machine::underway[at]);
    machine::underway[at].clear();
    for (int& n = machine::lanes[at]; n > 0; n--) machine::arrive_at(x);
    return (x.phase & 1) != parity;
  });
}
DEV void wait_for_previous() {}
DEV void dependents_may_start() {}
DEV void wait_then_release() {}

namespace machine {

// Number `k` of column `n`: what a descriptor says. Columns of 128 bytes have their units of 16 bytes turned by address
// bits 7 to 9; else eight units, of a column each, stand together.
inline float element(u64 columns, int n, int k) {
  const u32 begin = (u32)(columns & 0x3FFF) * 16, eight = (u32)(columns >> 32 & 0x3FFF) * 16;
  const u32 unit = (u32)(columns >> 16 & 0x3FFF) * 16;
  check(columns >> 62 < 2, "no such layout of columns is expected");
  u32 a = begin + n / 8 * eight;
  if (columns >> 62 == 1) {
    a += n % 8 * 128 + 2 * k;
    a ^= (a >> 7 & 7) << 4;
  } else {
    a += n % 8 * 16 + k / 8 * unit + k % 8 * 2;
  }
  u16 x;
  memcpy(&x, at(a, 2), 2);
  return from_bfloat16(x);
}
template <int N>
void multiply_now(float (&x)[N]) {
  for (const Product& product : self().products)
    for (int n = 0; n < N; n++) {
      const int c = n / 4 * 8 + current % 4 * 2 + n % 2;
      double sum = product.more ? x[n] : 0.0;
      const int row = current / 32 % 4 * 16 + current % 32 / 4 + n / 2 % 2 * 8;
      for (int k = 0; k < 16; k++) {
        const float x = product.a ? element(product.a, row, k) : product.rows[n / 2 % 2][k];
        sum += (double)x * element(product.b, c, k);
      }
      x[n] = (float)sum;
    }
  self().products.clear();
}
// What products read at these descriptors, `eights` times eight columns, was fenced by whoever copied it.
template <class Address>
void check_fenced(const std::vector<Product>& products, Address address, int eights) {
  u32 begin = ~0u, end = 0;
  for (const Product& product : products) {
    const u64 columns = address(product);
    if (columns == 0) continue;
    const u32 first = (u32)(columns & 0x3FFF) * 16 & ~127u;
    begin = min(begin, first);
    end = max(end, first + eights * ((u32)(columns >> 32 & 0x3FFF) * 16));
  }
  for (const Thread& t : threads)
    for (u32 copy : t.unfenced)
      check(copy < begin || copy >= end, "a product reads copies that no fence followed");
}

}  // namespace machine

DEV void fence_for_matrix_units() { machine::self().unfenced.clear(); }
DEV u64 columns_address(u32 at) { return (u64)(at >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
DEV u64 narrow_columns_address(u32 at) { return (u64)(at >> 4 & 0x3FFF) | 8ull << 16 | 16ull << 32; }
template <int N>
DEV void matrix_begin(float (&x)[N]) {
  for (float& y : x) y = NAN;
}
template <int N>
DEV void matrix_multiply(float (&)[N], const u32 (&a)[4], u64 b, bool more) {
  machine::Product product{{}, 0, b, more};
  for (int i = 0; i < 4; i++) {
    const u32* all = machine::exchange(a[i], 20 + i) + machine::current % 32 / 4 * 4;
    for (int k = 0; k < 8; k++)
      product.rows[i % 2][i / 2 * 8 + k] = machine::from_bfloat16((u16)(all[k / 2] >> 16 * (k % 2)));
  }
  machine::exchange((u32)b, 24);
  machine::self().products.push_back(product);
}
template <int N>
DEV void matrix_multiply_tile(float (&)[N], u64 a, u64 b, bool more) {
  machine::exchange((u32)a, 25);
  machine::exchange((u32)b, 24);
  machine::self().products.push_back({{}, a, b, more});
}
DEV void matrix_commit() {}
template <int N>
DEV void matrix_end(float (&x)[N]) {
  machine::exchange(0, 26);
  const auto& products = machine::self().products;
  machine::check_fenced(products, [](const machine::Product& x) { return x.b; }, N / 4);
  machine::check_fenced(products, [](const machine::Product& x) { return x.a; }, 8);
  machine::multiply_now(x);
}
