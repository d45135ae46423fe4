// INT2 tokens: the query as operands of products with codes (two int8 digits for few heads; one, or float16, for many),
// and the arithmetic of a tile in shared memory.
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
  // Lowest bit of codes as operands, as high as sums allow: a shift to the left may be a multiplication, beside masks.
  static constexpr int BIT = BITS_K == 2 ? (DK > 128 ? 4 : 6) : DK > 128 ? 0 : 4;
  static constexpr float MIDDLE = ((1 << BITS_K) - 1) * .5f * (1 << BIT);
  u32 digits[PAIRS][4][KC];
  int first[PAIRS][GK][2];
  float scale[NT], sum[NT][GK];
  DEV void load(const Params& p, const QueryRows& rows, int lane) {
    const int g = lane / 4, t = lane % 4;
    uint2 all[PAIRS][4][KC];  // nothing waits for the first before the last is asked for
    UNROLL for (int h = 0; h < PAIRS; h++) UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) {
      const int head = 8 * h + g % 2 * 4 + g / 2;
      all[h][r][c] = {0, 0};
      if (head < GW) all[h][r][c] = query_words(p, rows[head] * DK + r * (DK / 4) + 16 * c + 4 * t);
    }
    UNROLL for (int h = 0; h < PAIRS; h++) {
      u32 low = 0, high = 0;
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) {
        take_in_bf16(low, high, all[h][r][c].x);
        take_in_bf16(low, high, all[h][r][c].y);
      }
      float largest = fmaxf(fmaxf(-low_bf16(low), -high_bf16(low)), fmaxf(low_bf16(high), high_bf16(high)));
      largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
      const float unit = largest > 1e-30f ? __fdividef(127.f, largest) : 0.f;
      UNROLL for (int r = 0; r < 4; r++) UNROLL for (int c = 0; c < KC; c++) {
        const uint2 y = all[h][r][c];
        const float x[4] = {low_bf16(y.x), high_bf16(y.x), low_bf16(y.y), high_bf16(y.y)};
        u32 q[4];
        UNROLL for (int i = 0; i < 4; i++) q[i] = __float_as_uint(fmaf(x[i], unit, MAGIC));
        digits[h][r][c] = prmt(prmt(q[0], q[1], 0x40), prmt(q[2], q[3], 0x40), 0x5410);
      }
      // Sums over the channels of columns 2t and 2t + 1, as products with ones.
      UNROLL for (int v = 0; v < GK; v++) {
        constexpr u32 one = 0x3F803F80, ones = 0x01010101;
        float s[4] = {};
        int rounded[4] = {};
        UNROLL for (int r = v * 4 / GK; r < (v + 1) * 4 / GK; r++) UNROLL for (int c = 0; c < KC; c++) {
          mma_bf16(s, one, one, one, one, all[h][r][c].x, all[h][r][c].y);
          mma_u8_half(rounded, ones, ones, digits[h][r][c]);
        }
        UNROLL for (int i = 0; i < 2; i++) {
          const float most = __shfl_sync(ALL, largest, 8 * t + 4 * i), lost = fmaf(
              s[i], __shfl_sync(ALL, unit, 8 * t + 4 * i), -__int2float_rn(rounded[i]));
          scale[2 * h + i] = most * (p.scale * (1.f / (127 << BIT)));
          sum[2 * h + i][v] = s[i] * p.scale;
          first[h][v][i] = (int)__float_as_uint(fmaf(lost, MIDDLE, MAGIC));
        }
      }
    }
  }
};

typedef Either<!MANY_ROWS, Query8, Either<QUERY == 1, HalfQuery, ByteQuery>::type>::type Query;

// One tile of a warp: 32 tokens of one KV head, the first `valid` of which count.
struct Tile {
  // Whether a warp has read all of a tile before it makes weights, and others may overwrite it. With many rows that is
  // slower, and wide rows have no registers for it.
  static constexpr bool EARLY = !MANY_ROWS && PARTS_V * ((VC + 1) / 2) == 1;
  static constexpr int K_LOADS = (KC + 1) / 2, V_LOADS = (VC + 1) / 2;  // of a part
  u32 k_offset[PARTS_K * K_LOADS], v_offset[PARTS_V * V_LOADS], affine_offset;
  DEV void place(int lane, int head, int group) {
    const int token = 32 * group + (lane & 7);
    UNROLL for (int j = 0; j < PARTS_K * K_LOADS; j++) {
      const int row = token + (lane & 8), piece = j / K_LOADS * KC + min(j % K_LOADS * 2 + lane / 16, KC - 1);
      k_offset[j] = (row * ROW_UNITS + swizzle<ROW_UNITS>(row, head * PIECES + piece)) * 16;
    }
    UNROLL for (int j = 0; j < PARTS_V * V_LOADS; j++) {
      const int row = token + (VC == 1 ? lane & 8 : lane / 16 * 8),
                piece = KP + (VC == 1 ? j : 2 * j + (lane >> 3 & 1));
      v_offset[j] = (row * ROW_UNITS + swizzle<ROW_UNITS>(row, head * PIECES + piece)) * 16;
    }
    const int row = 32 * group + lane / 4, at = head * AFFINE;
    affine_offset = CODE_BYTES + row * AFFINE_ROW +
                    (AFFINE_TURNED ? swizzle<AFFINE_UNITS>(row, at / 16) * 16 + at % 16 : at);
  }
  // Logits of tokens that a row may not see become -infinity.
  DEV static void hide(const Params& p, const Sight& sight, int valid, int lane, float (&x)[NT][4]) {
    const int g = lane / 4;
    if (DRAFTS && valid < 31 + DRAFTS) {  // some rows read the last tokens from their ring
      const int end = Positions(sight.r, int2_end(p, sight.r)).count;
      UNROLL for (int n = 0; n < NT; n++) {
        const int mine = valid - end + Positions(sight.r, sight.exact_from(sight.drafts(n))).count;
        UNROLL for (int o = 0; o < 4; o++) x[n][o] = 8 * o + g < mine ? x[n][o] : -__int_as_float(0x7F800000);
      }
    } else if (valid < 32) {
      UNROLL for (int o = 0; o < 4; o++) UNROLL for (int n = 0; n < NT; n++)
          x[n][o] = 8 * o + g < valid ? x[n][o] : -__int_as_float(0x7F800000);
    }
  }
  // Of logits less their maximum: weights, and those of octet o times value scale in `b`: token pairs of column g.
  DEV static void weigh(const State& s, const float (&x)[NT][4], const float (&v_scale)[4][GV], int lane,
                        float (&w)[NT][4], u32 (&b)[PAIRS][4][GV]) {
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int o = 0; o < 4; o++) w[n][o] = ex2(x[n][o]);
    const u32 even = lane / 4 & 1 ? 0u : ALL;
    UNROLL for (int v = 0; v < GV; v++) {
      float scale[4];
      UNROLL for (int o = 0; o < 4; o++) scale[o] = COARSE ? v_scale[o][v] : v_scale[o][v] * s.value_scale;
      if constexpr (NT == 1) {
        UNROLL for (int o = 0; o < 4; o += 2) {
          const u32 y = transpose(pack_f16(w[0][o] * scale[o], w[0][o + 1] * scale[o + 1]));
          b[0][o][v] = y & even;
          b[0][o + 1][v] = y & ~even;
        }
      } else {
        UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int o = 0; o < 4; o++) {
          const float even = w[2 * j][o] * scale[o], odd = w[2 * j + 1][o] * scale[o];
          b[j][o][v] = transpose(COARSE ? pack_bf16(even, odd) : pack_f16(even, odd));
        }
      }
    }
  }
  // swizzle() repeats every eight tokens, so `step` more tokens are a constant number of bytes.
  DEV void compute(const Params& p, State& s, const Query& q, const Sight& sight, u32 stage, u32 empty, int valid,
                    bool first, int lane) const {
    float x[NT][4], k_scale[4][GK], k_offs[4][GK], v_scale[4][GV], v_offs[4][GV];
    UNROLL for (int o = 0; o < 4; o++)
        load_affine(stage + affine_offset + 8 * o * AFFINE_ROW, k_scale[o], k_offs[o], v_scale[o], v_offs[o]);
    UNROLL for (int u = 0; u < 2; u++) scores(p, s, q, stage, u, k_scale, k_offs, x);
    Codes codes[2];
    if (EARLY) UNROLL for (int u = 0; u < 2; u++) fetch(codes[u], stage, u);
    if (EARLY) arrive(empty);
    float top[NT], largest = v_scale[0][0], w[NT][4], l[NT];
    const bool rare = first || valid < (DRAFTS ? 31 + DRAFTS : 32);
    bool raise = rare;
    if (!COARSE) {
      raise |= highest(x, top) > HEADROOM;
      UNROLL for (int o = 0; o < 4; o++) UNROLL for (int v = 0; v < GV; v++) largest = fmaxf(largest, v_scale[o][v]);
      raise |= largest * s.value_scale > 64.f;
    }
    u32 b[PAIRS][4][GV];
    if (!EARLY && DV <= 128) fetch(codes[0], stage, 0);
    UNROLL_1 for (;;) {  // nothing waits for the vote
      weigh(s, x, v_scale, lane, w, b);
      UNROLL for (int n = 0; n < NT; n++) {
        l[n] = s.l[n] + w[n][0] + w[n][1] + w[n][2] + w[n][3];
        not_before(l[n]);
        if (COARSE) raise |= l[n] > MOST;
      }
      if (!__any_sync(ALL, raise)) break;
      raise = false;
      hide(p, sight, valid, lane, x);
      highest(x, top);
      float before[NT];
      UNROLL for (int n = 0; n < NT; n++) {
        before[n] = s.m[n];
        top[n] += before[n] - BIAS;
        if (first) s.m[n] = NEVER;
      }
      s.rescale(top, largest, first);
      UNROLL for (int n = 0; n < NT; n++) UNROLL for (int o = 0; o < 4; o++) x[n][o] += before[n] - s.m[n];
    }
    UNROLL for (int n = 0; n < NT; n++) s.l[n] = l[n];
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int o = 0; o < 4; o++) UNROLL for (int v = 0; v < GV; v++)
        s.z[n][v] = fmaf(w[n][o], v_offs[o][v], s.z[n][v]);
    if (!EARLY && DV > 128) fetch(codes[0], stage, 0);
    if (!EARLY) fetch(codes[1], stage, 1);
    if (!EARLY) arrive(empty);
    UNROLL for (int u = 0; u < 2; u++) values(s, b, codes[u], u);
  }
  // The highest logits of a lane's rows, and of all.
  DEV static float highest(const float (&x)[NT][4], float (&top)[NT]) {
    UNROLL for (int n = 0; n < NT; n++) top[n] = fmaxf(fmaxf(x[n][0], x[n][1]), fmaxf(x[n][2], x[n][3]));
    float y = top[0];
    UNROLL for (int n = 1; n < NT; n++) y = fmaxf(y, top[n]);
    return y;
  }
  DEV static void load_affine(u32 at, float (&ks)[GK], float (&ko)[GK], float (&vs)[GV], float (&vo)[GV]) {
    u32 w[GK + GV];
    if constexpr ((GK + GV) % 4 == 0 && AU == 16) {
      UNROLL for (int i = 0; i < GK + GV; i += 4) shared_load<4>(at ^ (4 * i), w + i);
    } else if constexpr (GK + GV == 2) {
      shared_load<2>(at, w);
    } else {
      UNROLL for (int i = 0; i < GK + GV; i++) shared_load<1>(at + 4 * i, w + i);
    }
    UNROLL for (int v = 0; v < GK; v++) {
      ks[v] = low_affine(w[v]);
      ko[v] = high_affine(w[v]);
    }
    UNROLL for (int v = 0; v < GV; v++) {
      vs[v] = low_affine(w[GK + v]);
      vo[v] = high_affine(w[GK + v]);
    }
  }
  // Logits of tokens 16u + g and 16u + 8 + g, less the maxima so far.
  DEV void scores(const Params& p, const State& s, const Query8& q, u32 stage, int u, const float (&ks)[4][GK],
                  const float (&ko)[4][GK], float (&x)[NT][4]) const {
    int d[NT][GK * SUMS][4];
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int r = 0; r < GK * SUMS; r++)
        d[n][r][0] = d[n][r][1] = d[n][r][2] = d[n][r][3] = 0;
    UNROLL for (int load = 0; load < PARTS_K * K_LOADS; load++) {
      const int j = load % K_LOADS;
      const u32 at = stage + k_offset[load] + 16 * u * ROW_UNITS * 16;
      u32 a[4];
      if (2 * j + 1 < KC)
        ldmatrix4(a, at);
      else
        ldmatrix2(a[0], a[1], at);
      UNROLL for (int i = 0; i < IN_BYTE_K; i++) {
        const u32 mask = fields<BITS_K>(0x01010101u, i);
        const int r = load / K_LOADS * IN_BYTE_K + i, sum = r * GK / 4 * SUMS + r % SUMS;
        UNROLL for (int n = 0; n < NT; n++) {
          if (2 * j + 1 < KC)
            mma_u8(d[n][sum], a[0] & mask, a[1] & mask, a[2] & mask, a[3] & mask, q.digits[n][r][2 * j],
                   q.digits[n][r][min(2 * j + 1, KC - 1)]);
          else
            mma_u8_half(d[n][sum], a[0] & mask, a[1] & mask, q.digits[n][r][2 * j]);
        }
      }
    }
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int i = 0; i < 2; i++) {
      const int o = 2 * u + i;
      float y = CAPPED ? 0.f : -s.m[n];
      UNROLL for (int v = 0; v < GK; v++) {
        int hi = d[n][v * SUMS][2 * i], lo = d[n][v * SUMS][2 * i + 1];
        UNROLL for (int r = v * SUMS + 1; r < (v + 1) * SUMS; r++) {
          hi = hi * (1 << BITS_K) + d[n][r][2 * i];
          lo = lo * (1 << BITS_K) + d[n][r][2 * i + 1];
        }
        y = fmaf(__int2float_rn(hi * 256 + lo), ks[o][v] * q.scale[n][v], fmaf(ko[o][v], q.sum[n][v], y));
      }
      x[n][o] = CAPPED ? logit(p, y) - s.m[n] : y;
    }
  }
  // The same with a query in float16.
  DEV void scores(const Params& p, const State& s, const HalfQuery& q, u32 stage, int u,
                  const float (&ks)[4][GK], const float (&ko)[4][GK], float (&x)[NT][4]) const {
    float c[PAIRS][GK][4];
    UNROLL for (int h = 0; h < PAIRS; h++) UNROLL for (int v = 0; v < GK; v++)
        c[h][v][0] = c[h][v][1] = c[h][v][2] = c[h][v][3] = 0.f;
    UNROLL for (int load = 0; load < PARTS_K * K_LOADS; load++) {
      const int j = load % K_LOADS * 2;
      const u32 at = stage + k_offset[load] + 16 * u * ROW_UNITS * 16;
      u32 a[4] = {};
      if (j + 1 < KC)
        ldmatrix4(a, at);
      else
        ldmatrix2(a[0], a[1], at);
      UNROLL for (int e = 0; e < 2; e++) {
        UNROLL for (int i = 0; i < IN_BYTE_K; i++) {
          const u32 mask = fields<BITS_K>(0x00010001u, i);
          const int r = load / K_LOADS * IN_BYTE_K + i, v = r * GK / 4;
          UNROLL for (int h = 0; h < PAIRS; h++) {
            if (j + 1 < KC)
              mma_f16(c[h][v], a[0] & mask, a[1] & mask, a[2] & mask, a[3] & mask, q.channels[h][r][e][j],
                      q.channels[h][r][e][min(j + 1, KC - 1)]);
            else
              mma_f16_half(c[h][v], a[0] & mask, a[1] & mask, q.channels[h][r][e][j]);
          }
        }
        UNROLL for (int i = 0; i < 4; i++) a[i] >>= 8;
      }
    }
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int i = 0; i < 2; i++) {
      const int o = 2 * u + i;
      float y = CAPPED ? 0.f : -s.m[n];
      UNROLL for (int v = 0; v < GK; v++)
          y = fmaf(c[n / 2][v][2 * i + n % 2], ks[o][v] * q.scale, fmaf(ko[o][v], q.sum[n][v], y));
      x[n][o] = CAPPED ? logit(p, y) - s.m[n] : y;
    }
  }
  // The same with a query of bytes.
  DEV void scores(const Params& p, const State& s, const ByteQuery& q, u32 stage, int u, const float (&ks)[4][GK],
                  const float (&ko)[4][GK], float (&x)[NT][4]) const {
    int d[PAIRS][GK][4];
    UNROLL for (int load = 0; load < PARTS_K * K_LOADS; load++) {
      const int j = load % K_LOADS * 2, next = min(j + 1, KC - 1);
      const u32 at = stage + k_offset[load] + 16 * u * ROW_UNITS * 16,
                mask = fields<BITS_K>(0x01010101u, 0) << ByteQuery::BIT;
      u32 a[4] = {};
      if (j + 1 < KC)
        ldmatrix4(a, at);
      else
        ldmatrix2(a[0], a[1], at);
      UNROLL for (int i = 0; i < IN_BYTE_K; i++) {
        const int r = load / K_LOADS * IN_BYTE_K + i, v = r * GK / 4;
        u32 y[4];
        UNROLL for (int k = 0; k < 4; k++) y[k] = shifted(a[k], ByteQuery::BIT - BITS_K * i) & mask;
        UNROLL for (int h = 0; h < PAIRS; h++) {
          if (j == 0 && r % (4 / GK) == 0)
            mma_u8_first(d[h][v], q.first[h][v], y[0], y[1], y[2], y[3], q.digits[h][r][j], q.digits[h][r][next]);
          else
            mma_u8(d[h][v], y[0], y[1], y[2], y[3], q.digits[h][r][j], q.digits[h][r][next]);
        }
      }
    }
    UNROLL for (int i = 0; i < 2; i++) {
      const int o = 2 * u + i;
      UNROLL for (int n = 0; n < NT; n++) {
        x[n][o] = CAPPED ? 0.f : -s.m[n];
        UNROLL for (int v = 0; v < GK; v++) {
          const float dot = fmaf(__int_as_float(d[n / 2][v][2 * i + n % 2]), ks[o][v], -ByteQuery::MAGIC * ks[o][v]);
          x[n][o] = fmaf(dot, q.scale[n], fmaf(ko[o][v], q.sum[n][v], x[n][o]));
        }
        if (CAPPED) x[n][o] = logit(p, x[n][o]) - s.m[n];
      }
    }
  }
  typedef u32 Codes[PARTS_V * V_LOADS][4];  // of 16 values
  DEV void fetch(Codes& codes, u32 stage, int u) const {
    UNROLL for (int load = 0; load < PARTS_V * V_LOADS; load++) {
      u32(&a)[4] = codes[load];
      const u32 at = stage + v_offset[load] + 16 * u * ROW_UNITS * 16;
      if constexpr (VC > 1)
        ldmatrix4_trans(a, at);
      else {
        ldmatrix2_trans(a[0], a[2], at);
        a[1] = a[0] >> 8;
        a[3] = a[2] >> 8;
      }
    }
  }
  DEV static void product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (COARSE)
      mma_bf16(c, a0, a1, a2, a3, b0, b1);
    else
      mma_f16(c, a0, a1, a2, a3, b0, b1);
  }
  DEV void values(State& s, const u32 (&b)[PAIRS][4][GV], Codes& codes, int u) const {
    UNROLL for (int load = 0; load < PARTS_V * V_LOADS; load++) {
      const int j = load % V_LOADS;
      u32(&a)[4] = codes[load];
      UNROLL for (int e = 0; e < (VC > 1 ? 2 : 1); e++) {
        UNROLL for (int i = 0; i < IN_BYTE_V; i++) {
          const u32 mask = fields<BITS_V>(0x00010001u, i);
          const int r = load / V_LOADS * IN_BYTE_V + i, v = r * GV / 4;
          UNROLL for (int h = 0; h < PAIRS; h++)
              product(s.acc[h][VC > 1 ? (j * 4 + r) * 2 + e : r], a[0] & mask, a[1] & mask, a[2] & mask, a[3] & mask,
                      b[h][2 * u][v], b[h][2 * u + 1][v]);
        }
        UNROLL for (int i = 0; i < 4; i++) a[i] >>= 8;
      }
    }
  }
};
