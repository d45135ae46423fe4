// What a warp keeps of its query heads, and how it leaves it for stage 2.
#pragma once

#include "types.cuh"

// What a warp knows of its query heads so far; `z` sums p * offset. Lane t: heads t (and 4 + t) of the warp.
struct State {
  float m[NT], l[NT], z[NT][GV], acc[MT][4], value_scale;
  DEV void clear() {
    value_scale = 1048576.f;
    UNROLL for (int i = 0; i < NT; i++) {
      m[i] = NEVER;
      l[i] = 0.f;
      UNROLL for (int v = 0; v < GV; v++) z[i][v] = 0.f;
    }
    UNROLL for (int i = 0; i < MT; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
  }
  // Raise the maxima to at least `top`; weights so far shrink with them. Also keeps scale * value_scale of values
  // within 64.
  DEV void rescale(const float (&top)[NT], float largest) {
    float factor[NT], change = 1.f;
    UNROLL for (int o = 4; o < 32; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, o));
    if (largest * value_scale > 64.f) {
      const float next = __uint_as_float((u32)(127 + 5 + 127 - (int)(__float_as_uint(largest) >> 23)) << 23);
      change = next * __uint_as_float((254u << 23) - __float_as_uint(value_scale));
      value_scale = next;  // powers of two
    }
    UNROLL for (int i = 0; i < NT; i++) {
      float t = top[i];
      UNROLL for (int o = 4; o < 32; o *= 2) t = fmaxf(t, __shfl_xor_sync(ALL, t, o));
      t = fmaxf(m[i], t);
      factor[i] = ex2(m[i] - t);
      m[i] = t;
      l[i] *= factor[i];
      UNROLL for (int v = 0; v < GV; v++) z[i][v] *= factor[i];
    }
    UNROLL for (int i = 0; i < MT; i++) {
      acc[i][0] *= factor[0] * change;
      acc[i][1] *= factor[NT - 1] * change;
      acc[i][2] *= factor[0] * change;
      acc[i][3] *= factor[NT - 1] * change;
    }
  }
};

// `x` is the logit in base 2, or twice the logit over the cap in base 2, see the launcher.
DEV float logit(const Params& p, float x) { return CAPPED ? p.cap * (1.f - __fdividef(2.f, 1.f + ex2(x))) : x; }

DEV void store_partial(const Params& p, State& s, size_t at, bool window,
                       int lane) {  // at: first head of the warp's partial
  const int g = lane / 4, t = lane % 4;
  UNROLL for (int n = 0; n < NT; n++) {
    UNROLL for (int o = 4; o < 32; o *= 2) {
      s.l[n] += __shfl_xor_sync(ALL, s.l[n], o);
      UNROLL for (int v = 0; v < GV; v++) s.z[n][v] += __shfl_xor_sync(ALL, s.z[n][v], o);
    }
    if (4 * n + t >= GW) continue;
    float* out = p.partial + (at + 4 * n + t) * DV;
    if (g == 0) p.stats[at + 4 * n + t] = make_float2(s.m[n], s.l[n]);
    const float unit = 16777216.f * __uint_as_float((254u << 23) - __float_as_uint(s.value_scale));
    UNROLL for (int m = 0; m < MT; m++) {
      UNROLL for (int i = 0; i < 2; i++) {  // rows g and g + 8
        const int r = VP > 1 ? m / 2 % 4 : m, e = VP > 1 ? m % 2 : i, piece = VP > 1 ? m / 8 * 2 + i : 0;
        float y = NT == 1 ? s.acc[m][2 * i] + s.acc[m][2 * i + 1] : s.acc[m][2 * i + n];
        y = window ? y : fmaf(y, unit / (1 << (2 * r)), s.z[n][r * GV / 4]);
        out[window ? (VP == 1 ? 8 * g + 2 * m + i : (m / 8 * 2 + i) * 64 + 8 * g + m % 8)
                   : r * (DV / 4) + 16 * piece + 2 * g + e] = y;
      }
    }
  }
}
