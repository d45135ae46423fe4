// A machine of the decode kernel on a CPU, in place of its own machine.cuh: the same functions, on fibers.
//
// Copies land as late as they may, when a warp waits for their barrier, or (`eager`) at once. Reads of global memory
// are checked where they go through one of these functions, and those of shared memory but for arrays that the kernel
// declares. The kernel in front has always ended.
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
DEV void shared_load(u32* x, u32 at) {
  memcpy(x, machine::at(at, 4 * N), 4 * N);
}
DEV void load_once(uint4& x, const void* at) { x = machine::load<uint4>(at); }
DEV void not_before(float&) {}
DEV void worked_out(const u8*&) {}

DEV float ex2(float x) { return exp2f(x); }
DEV u32 prmt(u32 a, u32 b, u32 bytes) {
  const u64 both = (u64)b << 32 | a;
  u32 x = 0;
  for (int i = 0; i < 4; i++) x |= (u32)(both >> 8 * (bytes >> 4 * i & 7) & 255) << 8 * i;
  return x;
}

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

DEV void prefetch(const void* at) { machine::load<u8>(at); }
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
DEV void commit_copies() { machine::self().groups.push_back(std::exchange(machine::self().copies, {})); }
template <int N>
DEV void wait_copies() {
  for (auto& groups = machine::self().groups; groups.size() > N; groups.erase(groups.begin())) machine::land(groups[0]);
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
