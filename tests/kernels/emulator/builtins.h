// What CUDA itself gives to the kernels, on fibers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace machine {

constexpr u32 BASE = 0x480;  // on the boundary of 128 bytes that kernels ask for, not on that which tiles need
struct Copy {
  u32 to, bytes;
  const void* from;  // null: zeros
};
struct Product {
  float rows[2][16];  // rows g and g + 8 of the warp, g = lane / 4
  u64 a;              // or where they are in shared memory; 0: in `rows`
  u64 b;
  bool more;
};
struct Held {
  std::vector<Copy> copies;               // since the last arrival, or the last group
  std::vector<std::vector<Copy>> groups;  // that nobody has waited for
  std::vector<u32> unfenced;              // where copies have landed since the last fence
  std::vector<Product> products;
};
inline long long long_ways;  // that warps took
struct Range {
  const u8* begin;
  size_t bytes;
};
inline std::vector<Range> readable;  // global memory; none: any

}  // namespace machine

#include "fibers.h"

using std::max;
using std::min;

#define threadIdx (machine::Dim{(u32)machine::current, 0})
#define blockIdx (machine::block)

namespace machine {

template <class T>
T load(const void* from) {
  const u8* begin = (const u8*)from;
  check((uintptr_t)from % sizeof(T) == 0, "address in global memory not aligned");
  auto inside = [=](const Range& x) { return begin >= x.begin && begin + sizeof(T) <= x.begin + x.bytes; };
  check(readable.empty() || std::any_of(readable.begin(), readable.end(), inside), "address outside of the tensors");
  T x;
  memcpy(&x, from, sizeof x);
  return x;
}
// The value of lane `from`.
template <class T>
T shuffle(T x, int from, u32 tag) {
  u32 mine;
  memcpy(&mine, &x, 4);
  const u32 other = exchange(mine, tag)[from & 31];
  memcpy(&x, &other, 4);
  return x;
}

}  // namespace machine

template <class T>
T __ldg(const T* from) {
  return machine::load<T>(from);
}
template <class T>
T __ldcg(const T* from) {
  return machine::load<T>(from);
}
inline void __syncthreads() { machine::arrive_and_wait(); }
inline bool __syncthreads_or(bool x) { return machine::arrive_and_wait(x); }
inline void __syncwarp() { machine::exchange(0, 1); }
template <class T>
T __shfl_sync(u32, T x, int lane, int width = 32) {
  return machine::shuffle(x, machine::current % 32 / width * width + lane % width, 2);
}
template <class T>
T __shfl_xor_sync(u32, T x, int mask) {
  return machine::shuffle(x, machine::current % 32 ^ mask, 100 + mask);
}
template <class T>
T __shfl_up_sync(u32, T x, int lanes) {
  const int lane = machine::current % 32;
  return machine::shuffle(x, lane < lanes ? lane : lane - lanes, 200 + lanes);
}
inline bool __any_sync(u32, bool x) {
  const u32* all = machine::exchange(x, 3);
  return std::any_of(all, all + 32, [](u32 y) { return y != 0; });
}
inline u32 __ballot_sync(u32, bool x) {
  const u32* all = machine::exchange(x, 16);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= all[i] << i;
  return bits;
}
inline int __reduce_max_sync(u32, int x) {
  const u32* all = machine::exchange((u32)x, 17);
  for (int i = 0; i < 32; i++) x = max(x, (int)all[i]);
  return x;
}

inline u32 __float_as_uint(float x) {
  u32 y;
  memcpy(&y, &x, 4);
  return y;
}
inline float __uint_as_float(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int x) { return __uint_as_float((u32)x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __saturatef(float x) { return x > 0.f ? fminf(x, 1.f) : 0.f; }
inline u32 __umulhi(u32 x, u32 y) { return (u32)((u64)x * y >> 32); }
inline u32 __byte_perm(u32 a, u32 b, u32 bytes) {
  const u64 both = (u64)b << 32 | a;
  u32 x = 0;
  for (int i = 0; i < 4; i++) x |= (u32)(both >> 8 * (bytes >> 4 * i & 7) & 255) << 8 * i;
  return x;
}
inline int __clz(u32 x) { return __builtin_clz(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
