// What a warpgroup keeps of its query rows, and how it leaves it for stage 2.
#pragma once

#include "group.cuh"

// What a warp knows of its query rows so far: maxima are those of the warpgroup, sums those of the warp's tokens,
// outputs those of its channels and of all tokens. Lane `t`: rows t, 4 + t, ...; as `State` otherwise.
struct GroupState {
  float m[NT], l[NT], z[NT][GV], acc[FRAGMENTS][NUMBERS], value_scale;
  // A sum of weights beyond which the maxima are raised; one of them may be as large.
  static constexpr float MOST = 256.f;
  DEV void clear() {
    value_scale = 1048576.f;
    UNROLL for (int n = 0; n < NT; n++) {
      m[n] = NEVER;
      l[n] = 0.f;
      UNROLL for (int v = 0; v < GV; v++) z[n][v] = 0.f;
    }
    UNROLL for (int f = 0; f < FRAGMENTS; f++) UNROLL for (int i = 0; i < NUMBERS; i++) acc[f][i] = 0.f;
  }
  // Logits are less the maxima so far, which are zero for the first tokens.
  DEV void begin() {
    UNROLL for (int n = 0; n < NT; n++) m[n] = 0.f;
  }
  // Raises the maxima to those of all warps and takes that from the logits `x`, which are less the maxima; see
  // `State::rescale`. The `first` tokens have no others before them. `largest` scale of values.
  template <int COUNT>
  DEV void raise(const Group& at, float (&x)[NT][COUNT], float largest, bool first, int lane) {
    const int g = lane / 4, t = lane % 4;
    UNROLL for (int o = 4; o < 32; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, o));
    if (lane == 0) at.give(at.largest(), largest);
    UNROLL for (int n = 0; n < NT; n++) {
      float top = x[n][0];
      UNROLL for (int o = 1; o < COUNT; o++) top = fmaxf(top, x[n][o]);
      UNROLL for (int o = 4; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, o));
      if (g == 0) at.give(at.place(0, 4 * n + t), top + m[n]);
    }
    at.sync();
    largest = Group::most(at.largest());
    float change = 1.f;
    if (largest * value_scale > 64.f) {
      const float next = __uint_as_float((u32)(127 + 5 + 127 - (int)(__float_as_uint(largest) >> 23)) << 23);
      change = next * __uint_as_float((254u << 23) - __float_as_uint(value_scale));
      value_scale = next;  // powers of two
    }
    UNROLL for (int n = 0; n < NT; n++) {
      const float top = fmaxf(first ? NEVER : m[n], Group::most(at.place(0, 4 * n + t))), less = m[n] - top,
                  factor = ex2(less);
      m[n] = top;
      UNROLL for (int o = 0; o < COUNT; o++) x[n][o] += less;
      if (first) continue;
      l[n] *= factor;
      UNROLL for (int v = 0; v < GV; v++) z[n][v] *= factor;
      UNROLL for (int f = 0; f < FRAGMENTS; f++) UNROLL for (int i = 0; i < 2; i++)
          acc[f][n / 2 * 4 + 2 * i + n % 2] *= factor * change;
    }
  }
};

// Stores the operand of one product: `pair(j, i)` are columns 8 j + 2 (lane % 4) and the next of its token
// 8 i + lane / 4.
template <class Pair>
DEV void store_weights(u32 to, int lane, Pair pair) {
  UNROLL for (int j = 0; j < PAIRS; j += 2) {
    u32 x[4];
    UNROLL for (int i = 0; i < 4; i++) x[i] = pair(min(j + i / 2, PAIRS - 1), i % 2);
    if (j + 1 < PAIRS) {
      stmatrix_trans(to + j * 256 + lane * 16, x);
    } else {
      const u32 last[2] = {x[0], x[1]};
      stmatrix_trans(to + j * 256 + lane % 16 * 16, last);
    }
  }
}

// Partial results of the warpgroup's query rows; `at`: the first of them. Every warp has its channels.
DEV void store_group(const Params& p, GroupState& s, const Group& group, size_t at, bool window, int lane) {
  const int g = lane / 4, t = lane % 4;
  group.sync();  // all have what they exchanged before, maybe those of another segment
  UNROLL for (int n = 0; n < NT; n++) UNROLL for (int v = -1; v < GV; v++) {
    float x = v < 0 ? s.l[n] : s.z[n][max(v, 0)];
    UNROLL for (int o = 4; o < 32; o *= 2) x += __shfl_xor_sync(ALL, x, o);
    if (g == 0) group.give(group.place(1 + v, 4 * n + t), x);
  }
  group.sync();
  const u32 unit = 24 + (127u - (__float_as_uint(s.value_scale) >> 23)) + 127;  // exponent
  UNROLL for (int n = 0; n < NT; n++) {
    const int row = 4 * n + t, first = n / 2 * 4 + n % 2;
    if (row >= GW) continue;
    if (group.warp == 0 && g == 0) p.stats[at + row] = make_float2(s.m[n], Group::sum(group.place(0, row)));
    float* out = p.partial + (at + row) * DV;
    if (window) {  // some channels one after the other
      UNROLL for (int f = 0; f < FRAGMENTS; f += 2)
          *reinterpret_cast<float4*>(out + 2 * FRAGMENTS * (8 * group.warp + g) + 2 * f) =
              make_float4(s.acc[f][first], s.acc[f][first + 2], s.acc[f + 1][first], s.acc[f + 1][first + 2]);
      continue;
    }
    float z[GV];
    UNROLL for (int v = 0; v < GV; v++) z[v] = Group::sum(group.place(1 + v, row));
    UNROLL for (int f = 0; f < FRAGMENTS; f++) {
      const int r = group.quarter(f);
      const float factor = __uint_as_float((unit - field_bit<BITS_V>(r)) << 23);
      UNROLL for (int i = 0; i < 2; i++)
          out[r * (DV / 4) + 16 * (2 * group.set() + i) + 2 * g + group.odd] =
              fmaf(s.acc[f][first + 2 * i], factor, z[Group::quantization_group(f)]);
    }
  }
}
