// What a warp keeps of its query heads, and how it leaves it for stage 2.
#pragma once

#include "drafts.cuh"

// What a warp knows of its query heads so far; `z` sums p * offset. Lane t: heads t, 4 + t, ... of the warp.
struct State {
  float m[NT], l[NT], z[NT][GV], acc[PAIRS][MT][4], value_scale;
  DEV void clear() {
    value_scale = 1048576.f;
    UNROLL for (int i = 0; i < NT; i++) {
      m[i] = NEVER;
      l[i] = 0.f;
      UNROLL for (int v = 0; v < GV; v++) z[i][v] = 0.f;
    }
    UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int i = 0; i < MT; i++)
        acc[j][i][0] = acc[j][i][1] = acc[j][i][2] = acc[j][i][3] = 0.f;
  }
  // Raise the maxima to at least `top`; weights so far shrink with them. Also keeps scale * value_scale of values
  // within 64.
  DEV void rescale(const float (&top)[NT], float largest, bool empty = false) {
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
    if (empty) return;  // nothing to shrink, nor to fetch the code for
    UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int i = 0; i < MT; i++) {
      const float even = factor[2 * j] * change, odd = factor[NT == 1 ? 0 : 2 * j + 1] * change;
      acc[j][i][0] *= even;
      acc[j][i][1] *= odd;
      acc[j][i][2] *= even;
      acc[j][i][3] *= odd;
    }
  }
};

// `x` is the logit in base 2, or twice the logit over the cap in base 2, see the launcher.
DEV float logit(const Params& p, float x) { return CAPPED ? p.cap * (1.f - __fdividef(2.f, 1.f + ex2(x))) : x; }

// Where a warp leaves its results: one row for each of its query heads.
struct Results {
  float* rows;
  int width;
  float2* stats;
};

// Lane (g, t) has channels of heads t, 4 + t, ...
DEV void store_partial(State& s, const Results& to, bool window, int lane) {
  const int g = lane / 4, t = lane % 4;
  UNROLL for (int n = 0; n < NT; n++) {
    UNROLL for (int o = 4; o < 32; o *= 2) {
      s.l[n] += __shfl_xor_sync(ALL, s.l[n], o);
      UNROLL for (int v = 0; v < GV; v++) s.z[n][v] += __shfl_xor_sync(ALL, s.z[n][v], o);
    }
    if (4 * n + t >= GW) continue;
    float* out = to.rows + (4 * n + t) * to.width;
    if (g == 0) to.stats[4 * n + t] = make_float2(s.m[n], s.l[n]);
    float y[MT][2];  // rows g and g + 8 of the products
    UNROLL for (int m = 0; m < MT; m++) UNROLL for (int i = 0; i < 2; i++)
        y[m][i] = NT == 1 ? s.acc[0][m][2 * i] + s.acc[0][m][2 * i + 1] : s.acc[n / 2][m][2 * i + n % 2];
    if (window) {  // eight channels of every 64
      UNROLL for (int c = 0; c < DV / 64; c++) UNROLL for (int k = 0; k < 8; k += 4) {
        float z[4];
        UNROLL for (int i = 0; i < 4; i++) z[i] = VC == 1 ? y[(k + i) / 2][(k + i) % 2] : y[c / 2 * 8 + k + i][c % 2];
        *reinterpret_cast<float4*>(out + 64 * c + 8 * g + k) = make_float4(z[0], z[1], z[2], z[3]);
      }
    } else {  // two of every 16 of a quarter
      const float unit = 16777216.f * __uint_as_float((254u << 23) - __float_as_uint(s.value_scale));
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < DV / 64; c++) {
        const float factor = unit / (1 << field_bit<BITS_V>(r)), offset = s.z[n][r * GV / 4];
        const int m = VC == 1 ? r : (c / 2 * 4 + r) * 2;
        *reinterpret_cast<float2*>(out + r * (DV / 4) + 16 * c + 2 * g) =
            make_float2(fmaf(y[m][VC == 1 ? 0 : c % 2], factor, offset),
                        fmaf(VC == 1 ? y[m][1] : y[m + 1][c % 2], factor, offset));
      }
    }
  }
}
