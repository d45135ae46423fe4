// The query as operands of products with codes: two int8 digits for few heads; one, or float16, for many.
#pragma once

#include "state.cuh"

// The query as int8 digits: B operands, and per head of this lane the factors of q . code and of the offset.
struct Query8 {
  u32 digits[NT][4][KC];
  float scale[NT][GK], sum[NT][GK];
  // Few instructions: this code runs once, and to fetch it takes longer than to run it. q + 128 in the low 16 bits of
  // a float has the digits in its bytes, the low one with its top bit turned.
  DEV void load(const Params& p, const QueryRows& rows, int lane) {
    const int g = lane / 4, t = lane % 4;
    const u32 digit = g & 1 ? 0x40 : 0x51, turned = g & 1 ? 0x80808080u : 0u;
    UNROLL for (int n = 0; n < NT; n++) {
      const int head = 4 * n + g / 2;
      float x[4][KC][4], largest = 0.f, s[GK];
      UNROLL for (int v = 0; v < GK; v++) s[v] = 0.f;
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) {
        x[r][c][0] = x[r][c][1] = x[r][c][2] = x[r][c][3] = 0.f;
        if (head < GW) query_four(p, rows[head] * DK + r * (DK / 4) + 16 * c + 4 * t, x[r][c]);
      }
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) UNROLL for (int i = 0; i < 4; i++) {
        s[r * GK / 4] += x[r][c][i];
        largest = fmaxf(largest, fabsf(x[r][c][i]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
      const float unit = largest > 1e-30f ? __fdividef(32639.f, largest) : 0.f;  // 127 * 256 + 127
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) {
        u32 q[4];
        UNROLL for (int i = 0; i < 4; i++) q[i] = __float_as_uint(fmaf(x[r][c][i], unit, 12582912.f + 128.f));
        digits[n][r][c] = prmt(prmt(q[0], q[1], digit), prmt(q[2], q[3], digit), 0x5410) ^ turned;
      }
      const float factor = __shfl_sync(ALL, largest, 8 * t) * (p.scale * (1.f / 32639.f));
      UNROLL for (int v = 0; v < GK; v++) {
        s[v] += __shfl_xor_sync(ALL, s[v], 1);
        s[v] += __shfl_xor_sync(ALL, s[v], 2);
        sum[n][v] = __shfl_sync(ALL, s[v], 8 * t) * p.scale;
        scale[n][v] = factor / (1 << field_bit<BITS_K>((v + 1) * 4 / GK - 1));
      }
    }
  }
};

// The query in float16, for as many heads as a product has columns. Column g is head g / 2 or 4 + g / 2. A query of 16
// bits stays exact: a power of two puts the largest number of all heads below 2^15.
struct HalfQuery {
  u32 channels[PAIRS][4][2][KC];  // [.., r, e, c]: channels 4t + e and 4t + e + 2 of piece c of quarter r
  float scale, sum[NT][GK];       // of q . code, for all heads, and per head of this lane of the offset
  DEV void load(const Params& p, const QueryRows& rows, int lane) {
    const int g = lane / 4, t = lane % 4;
    float x[PAIRS][4][KC][4], largest = 0.f;
    UNROLL for (int h = 0; h < PAIRS; h++) {
      const int head = 8 * h + g % 2 * 4 + g / 2;
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) {
        x[h][r][c][0] = x[h][r][c][1] = x[h][r][c][2] = x[h][r][c][3] = 0.f;
        if (head < GW) query_four(p, rows[head] * DK + r * (DK / 4) + 16 * c + 4 * t, x[h][r][c]);
      }
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) UNROLL for (int i = 0; i < 4; i++)
          largest = fmaxf(largest, fabsf(x[h][r][c][i]));
    }
    UNROLL for (int o = 1; o < 32; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, o));
    const u32 exponent = 268 - max(__float_as_uint(largest) >> 23, 20u);  // of the power of two
    const float unit = __uint_as_float(exponent << 23);
    scale = p.scale * 16777216.f * __uint_as_float((254 - exponent) << 23);
    UNROLL for (int h = 0; h < PAIRS; h++) UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++)
        UNROLL for (int e = 0; e < 2; e++) {
      const float factor = unit / (1 << field_bit<BITS_K>(r));
      channels[h][r][e][c] = pack_f16(x[h][r][c][e] * factor, x[h][r][c][e + 2] * factor);
    }
    UNROLL for (int h = 0; h < PAIRS; h++) UNROLL for (int v = 0; v < GK; v++) {
      float c[4] = {};  // products with ones, which take fewer instructions than sums
      UNROLL for (int r = v * 4 / GK; r < (v + 1) * 4 / GK; r++) UNROLL for (int e = 0; e < 2; e++)
          UNROLL for (int j = 0; j < KC; j++) {
        const u32 one = 0x3C003C00u + 0x04000400u * field_bit<BITS_K>(r);
        mma_f16_half(c, one, one, channels[h][r][e][j]);
      }
      UNROLL for (int i = 0; i < 2; i++) sum[2 * h + i][v] = c[i] * (scale * (1.f / 16777216.f));
    }
  }
};

// The query as one int8 digit, for as many heads as a product has columns, in the order of HalfQuery. Sums of products
// begin with MAGIC, so that their bits are a float, and with what rounding takes from the query times the middle of the
// codes: then only the distance of a code from that middle meets an error of rounding.
struct ByteQuery {
  static constexpr float MAGIC = 12582912.f;
  static constexpr float MIDDLE = ((1 << BITS_K) - 1) * .5f;
  u32 digits[PAIRS][4][KC];
  int first[PAIRS][GK][2];
  float scale[NT], sum[NT][GK];
  DEV void load(const Params& p, const QueryRows& rows, int lane) {
    const int g = lane / 4, t = lane % 4;
    float all[PAIRS][4][KC][4];  // nothing waits for the first before the last is asked for
    UNROLL for (int h = 0; h < PAIRS; h++) UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) {
      const int head = 8 * h + g % 2 * 4 + g / 2;
      all[h][r][c][0] = all[h][r][c][1] = all[h][r][c][2] = all[h][r][c][3] = 0.f;
      if (head < GW) query_four(p, rows[head] * DK + r * (DK / 4) + 16 * c + 4 * t, all[h][r][c]);
    }
    UNROLL for (int h = 0; h < PAIRS; h++) {
      const float(&x)[4][KC][4] = all[h];
      float largest = 0.f, s[GK];
      int rounded[GK];
      UNROLL for (int v = 0; v < GK; v++) s[v] = rounded[v] = 0;
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) UNROLL for (int i = 0; i < 4; i++) {
        s[r * GK / 4] += x[r][c][i];
        largest = fmaxf(largest, fabsf(x[r][c][i]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
      const float unit = largest > 1e-30f ? __fdividef(127.f, largest) : 0.f;
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) {
        u32 q[4];
        UNROLL for (int i = 0; i < 4; i++) q[i] = __float_as_uint(fmaf(x[r][c][i], unit, MAGIC));
        digits[h][r][c] = prmt(prmt(q[0], q[1], 0x40), prmt(q[2], q[3], 0x40), 0x5410);
        rounded[r * GK / 4] = add_bytes(digits[h][r][c], rounded[r * GK / 4]);
      }
      float lost[GK];
      UNROLL for (int v = 0; v < GK; v++) {
        lost[v] = fmaf(s[v], unit, -__int2float_rn(rounded[v]));
        UNROLL for (int o = 1; o < 4; o *= 2) {
          s[v] += __shfl_xor_sync(ALL, s[v], o);
          lost[v] += __shfl_xor_sync(ALL, lost[v], o);
        }
      }
      UNROLL for (int i = 0; i < 2; i++) {  // the owner of column 2t + i
        const int owner = 8 * t + 4 * i;
        scale[2 * h + i] = __shfl_sync(ALL, largest, owner) * (p.scale * (1.f / 127.f));
        UNROLL for (int v = 0; v < GK; v++) {
          sum[2 * h + i][v] = __shfl_sync(ALL, s[v], owner) * p.scale;
          first[h][v][i] = (int)__float_as_uint(fmaf(__shfl_sync(ALL, lost[v], owner), MIDDLE, MAGIC));
        }
      }
    }
  }
};

template <int, bool>
struct QueryChoice {
  typedef Query8 type;
};
template <>
struct QueryChoice<0, true> {
  typedef ByteQuery type;
};
template <>
struct QueryChoice<1, true> {
  typedef HalfQuery type;
};
typedef QueryChoice<QUERY, MANY_ROWS>::type Query;
