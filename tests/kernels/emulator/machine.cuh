// A machine of the write kernel on a CPU, in place of its own machine.cuh: the same functions, on fibers.
//
// Copies land as late as they may, at their wait, or (`eager`) at once. A product reads shared memory when its warp
// waits for it. A fence left out is an error, beside those of fibers.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV inline
#define UNROLL
#define UNROLL_1
#define KERNEL(name, threads, parameters)  \
  constexpr int name##_threads = threads; \
  void name(const parameters)
#define ALL 0xFFFFFFFFu

namespace machine {

constexpr u32 BASE = 0x430;  // of dynamic shared memory: not on the boundary that tiles need
struct Copy {
  u32 to;
  const void* from;
};
struct Product {
  float rows[2][16];  // rows g and g + 8 of the warp, g = lane / 4
  u64 a;              // or where they are in shared memory; 0: in `rows`
  u64 b;
  bool more;
};
struct Held {
  std::vector<u32> unfenced_copies;
  std::vector<std::vector<Copy>> copies = std::vector<std::vector<Copy>>(1);
  std::vector<Product> products;
};
inline long long_ways;  // that warps took

}  // namespace machine

#include "fibers.h"

using std::max;
using std::min;

namespace machine {

inline void land(const std::vector<Copy>& group) {
  for (const Copy& c : group) memcpy(at(c.to, 16), c.from, 16);
}
inline float float16(u16 x) {
  const int exponent = x >> 10 & 31, sign = x >> 15 ? -1 : 1;
  const float digits = (float)(x & 1023) + (exponent ? 1024.f : 0.f);
  return (float)sign * std::ldexp(digits, (exponent ? exponent : 1) - 25);
}
inline float bfloat16(u16 x) {
  const u32 bits = (u32)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
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
  return bfloat16(x);
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
    for (u32 copy : t.unfenced_copies)
      check(copy < begin || copy >= end, "a product reads copies that no fence followed");
}

}  // namespace machine

DEV int thread_index() { return machine::current; }
DEV int block_index() { return machine::block.x; }
DEV u32 dynamic_shared() { return machine::BASE; }

DEV void not_before(long long&) {}
DEV void long_way() { machine::long_ways += machine::current % 32 == 0; }

DEV u32 bits_of(float x) {
  u32 y;
  memcpy(&y, &x, 4);
  return y;
}
DEV float float_of(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
DEV float multiply(float x, float y) { return x * y; }
DEV float saturate(float x) { return x > 0.f ? fminf(x, 1.f) : 0.f; }
DEV float reciprocal(float x) { return (1.f + 2e-7f) / x; }  // off by what the machine may be off
DEV u32 multiply_high(u32 x, u32 y) { return (u32)((u64)x * y >> 32); }
DEV u32 permute(u32 a, u32 b, u32 bytes) {
  const u64 both = (u64)b << 32 | a;
  u32 x = 0;
  for (int i = 0; i < 4; i++) x |= (u32)(both >> 8 * (bytes >> 4 * i & 7) & 255) << 8 * i;
  return x;
}
DEV u32 min_u16x2(u32 a, u32 b) { return min(a & 0xFFFF, b & 0xFFFF) | min(a >> 16, b >> 16) << 16; }
DEV u32 max_u16x2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
DEV u32 pack_f16(float low, float high) {
  const _Float16 x[2] = {(_Float16)low, (_Float16)high};
  u32 y;
  memcpy(&y, x, 4);
  return y;
}
DEV u32 round_bf16(float x) {
  const u32 bits = bits_of(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
struct float2 {
  float x, y;
};
struct uint2 {
  u32 x, y;
};
DEV float2 unpack_f16(u32 x) { return {machine::float16((u16)x), machine::float16((u16)(x >> 16))}; }
DEV u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }

template <class T>
DEV T shuffle_xor(T x, int mask) {
  u32 mine;
  memcpy(&mine, &x, 4);
  const u32 other = machine::exchange(mine, 100 + mask)[(machine::current % 32) ^ mask];
  memcpy(&x, &other, 4);
  return x;
}
DEV u32 shuffle_from(u32 x, int lane) { return machine::exchange(x, 6)[lane]; }
DEV bool any(bool x) {
  const u32* all = machine::exchange(x, 1);
  return std::any_of(all, all + 32, [](u32 y) { return y != 0; });
}
DEV u32 vote(bool x) {
  const u32* all = machine::exchange(x, 7);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= all[i] << i;
  return bits;
}
DEV int last_one(u32 x) { return 31 - __builtin_clz(x); }
DEV int count(bool x) {
  const u32* all = machine::exchange(x, 4);
  return (int)std::count_if(all, all + 32, [](u32 y) { return y != 0; });
}
DEV int reduce_max(int x) {
  const u32* all = machine::exchange((u32)x, 5);
  int most = x;
  for (int i = 0; i < 32; i++) most = max(most, (int)all[i]);
  return most;
}

DEV void block_sync() { machine::arrive_and_wait(); }
DEV void warp_sync() { machine::exchange(0, 8); }
DEV void dependents_may_start() {}
DEV void wait_for_previous() {}

DEV void prefetch(const void* at) { (void)*static_cast<const volatile u8*>(at); }
DEV void copy_async(u32 to, const void* from) {
  machine::check((uintptr_t)from % 16 == 0, "source of a copy is not aligned");
  if (machine::eager) machine::land({{to, from}});
  machine::self().copies.back().push_back({to, from});
}
DEV void copies_commit() { machine::self().copies.emplace_back(); }
template <int N>
DEV void copies_wait_but() {
  machine::Thread& t = machine::self();
  machine::check(t.copies.back().empty(), "copies that no group has");
  while (t.copies.size() > N + 1) {
    machine::land(t.copies.front());
    for (const machine::Copy& copy : t.copies.front()) t.unfenced_copies.push_back(copy.to);
    t.copies.erase(t.copies.begin());
  }
}
DEV void copies_wait() { copies_wait_but<0>(); }
DEV void load_operand(u32 (&x)[4], u32 at) {
  u32 rows[32];
  memcpy(rows, machine::exchange(at, 9), sizeof rows);
  const int lane = machine::current % 32;
  for (int i = 0; i < 4; i++) memcpy(&x[i], machine::at(rows[8 * i + lane / 4], 16) + lane % 4 * 4, 4);
}
DEV float shared_load(u32 at) {
  float x;
  memcpy(&x, machine::at(at, 4), 4);
  return x;
}
template <int N>
DEV void shared_words(u32 at, u32 (&x)[N]) {
  machine::check(at % sizeof x == 0, "a load is not aligned");
  memcpy(x, machine::at(at, sizeof x), sizeof x);
}
DEV void shared_store(u32 at, float x, float y) {
  const float both[2] = {x, y};
  memcpy(machine::at(at, 8), both, 8);
}
DEV void store_byte(u8* to, u8 x) { *to = x; }
DEV void store_half(u16* to, u16 x) { *to = x; }
DEV void store_word(void* to, u32 x) { memcpy(to, &x, 4); }
template <int N>
DEV void store_words(void* to, const u32 (&x)[N]) {
  machine::check((uintptr_t)to % (4 * N) == 0, "target of a store is not aligned");
  memcpy(to, x, 4 * N);
}

DEV void fence_for_matrix_units() { machine::self().unfenced_copies.clear(); }
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
      product.rows[i % 2][i / 2 * 8 + k] = machine::bfloat16((u16)(all[k / 2] >> 16 * (k % 2)));
  }
  machine::exchange((u32)b, 2);
  machine::self().products.push_back(product);
}
template <int N>
DEV void matrix_multiply_tile(float (&)[N], u64 a, u64 b, bool more) {
  machine::exchange((u32)a, 10);
  machine::exchange((u32)b, 2);
  machine::self().products.push_back({{}, a, b, more});
}
DEV void matrix_commit() {}
template <int N>
DEV void matrix_end(float (&x)[N]) {
  machine::exchange(0, 3);
  const auto& products = machine::self().products;
  machine::check_fenced(products, [](const machine::Product& x) { return x.b; }, N / 4);
  machine::check_fenced(products, [](const machine::Product& x) { return x.a; }, 8);
  machine::multiply_now(x);
}
